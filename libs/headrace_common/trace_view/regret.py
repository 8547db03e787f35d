"""The best other placement of requests, and sums over many. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from headrace.inference.v1 import trace_pb2
from headrace_common.telemetry import schema

NO_ESTIMATE: Final = "no estimate"


@dataclass(frozen=True, slots=True)
class Regrets:
    """Requests with one kind of best other placement, of which `better_count` would have been earlier with it.

    The sum is over these. `worst_request_id` would have gained most. The kind of the others is NO_ESTIMATE.
    """

    other: str
    request_count: int
    better_count: int
    sum_ms: float
    worst_ms: float
    worst_request_id: str


def regret_text(root: Mapping[str, str]) -> str:
    """Such as "local prefill on w1: 310 ms earlier", from the attributes of a root span. Empty without an estimate."""
    kind = root.get(schema.ATTRIBUTE_OTHER_DECISION)
    if kind is None:
        return ""
    gained_ms = _gained_ms(root)
    decode = root.get(schema.ATTRIBUTE_OTHER_DECODE_WORKER_ID, "")
    prefill = root.get(schema.ATTRIBUTE_OTHER_PREFILL_WORKER_ID, decode)
    workers = decode if prefill == decode else f"{decode}, prompt on {prefill}"
    return f"{kind} on {workers}: {abs(gained_ms):.0f} ms {'earlier' if gained_ms > 0 else 'later'}"


def regrets_of(traces: Iterable[trace_pb2.Trace]) -> list[Regrets]:
    """One for each kind, the greatest sum first, and requests without an estimate last."""
    gained: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for trace in traces:
        for span in trace.spans:
            if span.name == schema.SPAN_REQUEST:
                kind = span.attributes.get(schema.ATTRIBUTE_OTHER_DECISION, NO_ESTIMATE)
                request_id = span.attributes.get(schema.ATTRIBUTE_REQUEST_ID, trace.request_id)
                gained[kind].append((max(0.0, _gained_ms(span.attributes)), request_id))
    found = [_sum(kind, several) for kind, several in gained.items()]
    return sorted(found, key=lambda one: (one.other == NO_ESTIMATE, -one.sum_ms, one.other))


def _sum(kind: str, several: list[tuple[float, str]]) -> Regrets:
    better = [one for one in several if one[0] > 0]
    worst_ms, worst = max(better, default=(0.0, ""))
    total_ms = sum(gained_ms for gained_ms, _ in better)
    return Regrets(kind, len(several), len(better), total_ms, worst_ms, worst)


def _gained_ms(root: Mapping[str, str]) -> float:
    try:
        return float(root.get(schema.ATTRIBUTE_OTHER_GAIN_MS, "0"))
    except ValueError:
        return 0.0
