"""The parts of a latency: those that the router reported, or those of the steps that have arrived. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from headrace_common.latency.parts import Claim, Part, divide
from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import PART_ATTRIBUTES
from headrace_common.trace_view.model import PartTime

_NS_PER_US = 1_000
# Later steps count only where no earlier one does: compute hides the wait for KV beside it.
_STEPS = (
    (schema.SPAN_TOKENIZE, Part.TOKENIZE),
    (schema.SPAN_ROUTE, Part.ROUTE),
    (schema.SPAN_RESERVE, Part.RESERVE),
    (schema.SPAN_QUEUE, Part.QUEUE),
    (schema.SPAN_PREFILL_COMPUTE, Part.PREFILL),
    (schema.SPAN_DECODE_KV_WAIT, Part.TRANSFER_EXPOSED),
    (schema.SPAN_DECODE_LOGITS_WAIT, Part.TRANSFER_EXPOSED),
    (schema.SPAN_DECODE_FIRST_TOKEN, Part.FIRST_STEP),
)


class Timed(Protocol):
    """Something with a start and an end, in nanoseconds."""

    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...


def reported_parts(attributes: Mapping[str, str]) -> tuple[PartTime, ...]:
    """The parts in the attributes of a span, in the order of a request. Empty when it has none."""
    times = ((part, attributes.get(name, "")) for part, name in PART_ATTRIBUTES.items())
    return tuple(
        PartTime(_name(part), int(text) * _NS_PER_US) for part, text in times if text.isdecimal()
    )


def parts_of_steps(named: Mapping[str, Sequence[Timed]], end_ns: int) -> tuple[PartTime, ...]:
    """The parts up to `end_ns` of a request for which the router has reported none yet."""
    claims = [
        Claim(part, one.start_ns, one.end_ns)
        for span_name, part in _STEPS
        for one in named.get(span_name, ())
    ]
    found = divide(0, end_ns, claims).parts_us
    return tuple(PartTime(_name(part), found[part]) for part in PART_ATTRIBUTES if part in found)


def _name(part: Part) -> str:
    return part.label.replace("_", " ")
