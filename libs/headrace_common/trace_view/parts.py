"""The parts of the time to first token, from the steps of a trace. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace_common.telemetry import schema
from headrace_common.trace_view.model import TRANSFER_EXPOSED, UNACCOUNTED, Part


class Timed(Protocol):
    """Something with a start and an end."""

    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...


# In the order of a request. A later step counts from the end of the one before it.
_STEPS = (
    ("tokenize", schema.SPAN_TOKENIZE),
    ("route", schema.SPAN_ROUTE),
    ("reserve", schema.SPAN_RESERVE),
    ("queue", schema.SPAN_QUEUE),
    ("prefill compute", schema.SPAN_PREFILL_COMPUTE),
    (TRANSFER_EXPOSED, schema.SPAN_DECODE_KV_WAIT),
    ("first step", schema.SPAN_DECODE_FIRST_TOKEN),
)


def parts_of(named: Mapping[str, Sequence[Timed]], ttft_ns: int) -> tuple[Part, ...]:
    """The parts, by start. They add up to `ttft_ns`: what no step covers is unaccounted."""
    parts: list[Part] = []
    reached = missing = 0
    for name, span_name in _STEPS:
        for step in named.get(span_name, ()):
            start = max(step.start_ns, reached)
            end = min(step.end_ns, ttft_ns)
            if end > start:
                missing += start - reached
                parts.append(Part(name, start, end - start))
                reached = end
    missing += max(0, ttft_ns - reached)
    if ttft_ns > 0:
        parts.append(Part(UNACCOUNTED, ttft_ns, missing))
    return tuple(parts)
