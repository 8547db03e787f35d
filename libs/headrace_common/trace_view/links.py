"""The links of a trace: one span for each pair of ranks, or one for each layer's write. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from headrace.inference.v1 import trace_pb2
from headrace_common.telemetry import schema
from headrace_common.telemetry.layer_stamps import LayerStamps, unpack_writes
from headrace_common.trace_view.model import LayerWrite, Link

TRANSFER_SPANS: Final = frozenset((schema.SPAN_TRANSFER_LINK, schema.SPAN_TRANSFER_LAYER))
"""The spans that links are read from."""
_NS_PER_MS: Final = 1e6
_LinkKey: TypeAlias = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """A span with its times since the request's arrival."""

    span: trace_pb2.Span
    start_ns: int
    end_ns: int

    def text(self, attribute: str, default: str = "") -> str:
        """An attribute, or `default` where it is missing."""
        return self.span.attributes.get(attribute, default)

    def number(self, attribute: str) -> int:
        """An attribute as an integer; 0 where it is missing or no number."""
        text = self.text(attribute)
        return int(text) if text.lstrip("-").isdecimal() else 0

    def real(self, attribute: str) -> float:
        """An attribute as a number; 0 where it is missing or none."""
        try:
            return float(self.text(attribute, "0"))
        except ValueError:
            return 0.0


def read_links(spans: Sequence[TimedSpan]) -> tuple[Link, ...]:
    """The links of all attempts, by name. Spans of single layers count where no span of their link has arrived."""
    by_id = {one.span.span_id: one for one in spans}
    links = [_link(one, by_id) for one in spans if one.span.name == schema.SPAN_TRANSFER_LINK]
    if not links:
        links = _links_of_layers(spans, by_id)
    return tuple(sorted(links, key=lambda link: (link.name, link.start_ns)))


def _link(one: TimedSpan, by_id: Mapping[str, TimedSpan]) -> Link:
    stamps = unpack_writes(one.text(schema.ATTRIBUTE_LINK_LAYERS))
    return Link(
        *(one.span.worker_id, one.number(schema.ATTRIBUTE_SOURCE_RANK)),
        *(_decode_worker(one, by_id), one.number(schema.ATTRIBUTE_DESTINATION_RANK)),
        transport=one.text(schema.ATTRIBUTE_TRANSPORT),
        strategy=one.text(schema.ATTRIBUTE_STRATEGY),
        payload_bytes=one.number(schema.ATTRIBUTE_PAYLOAD_BYTES),
        moving_ns=round(one.real(schema.ATTRIBUTE_MOVING_MS) * _NS_PER_MS),
        runs=one.number(schema.ATTRIBUTE_RUNS),
        entries=one.number(schema.ATTRIBUTE_ENTRIES),
        expected_ns=round(one.real(schema.ATTRIBUTE_EXPECTED_MS) * _NS_PER_MS),
        bandwidth_share=one.real(schema.ATTRIBUTE_BANDWIDTH_SHARE),
        error=one.span.error,
        writes=_writes(stamps, one.start_ns),
    )


def _writes(stamps: Iterable[LayerStamps], origin_ns: int) -> tuple[LayerWrite, ...]:
    writes: list[LayerWrite] = []
    previous_landed_ns = 0
    for stamp in stamps:
        cause, cause_ns = stamp.cause(previous_landed_ns)
        previous_landed_ns = max(previous_landed_ns, stamp.landed_ns)
        writes.append(
            LayerWrite(
                layer=stamp.layer,
                ready_ns=origin_ns + stamp.ready_ns,
                submitted_ns=origin_ns + stamp.submitted_ns,
                gathered_ns=origin_ns + stamp.gathered_ns,
                landed_ns=origin_ns + stamp.landed_ns,
                payload_bytes=stamp.payload_bytes,
                cause=cause,
                cause_ns=cause_ns,
                finished=stamp.finished,
            )
        )
    return tuple(sorted(writes, key=lambda write: (write.submitted_ns, write.layer)))


def _decode_worker(one: TimedSpan, by_id: Mapping[str, TimedSpan]) -> str:
    """The decode worker that a span, or a span around it, names."""
    seen: set[str] = set()
    while one.span.span_id not in seen:
        name = one.text(schema.ATTRIBUTE_DECODE_WORKER_ID)
        if name:
            return name
        seen.add(one.span.span_id)
        one = by_id.get(one.span.parent_span_id, one)
    return "decode"


def _links_of_layers(spans: Iterable[TimedSpan], by_id: Mapping[str, TimedSpan]) -> list[Link]:
    found: dict[_LinkKey, list[TimedSpan]] = defaultdict(list)
    for one in spans:
        if one.span.name == schema.SPAN_TRANSFER_LAYER:
            key = (
                one.span.worker_id,
                one.text(schema.ATTRIBUTE_SOURCE_RANK, "0"),
                _decode_worker(one, by_id),
                one.text(schema.ATTRIBUTE_DESTINATION_RANK, "0"),
            )
            found[key].append(one)
    return [_link_of_layers(key[2], sent) for key, sent in found.items()]


def _link_of_layers(destination: str, sent: Sequence[TimedSpan]) -> Link:
    writes = [
        LayerWrite(
            layer=one.number(schema.ATTRIBUTE_LAYER),
            ready_ns=one.start_ns - round(one.real(schema.ATTRIBUTE_SEND_WAIT_MS) * _NS_PER_MS),
            submitted_ns=one.start_ns,
            gathered_ns=one.start_ns,
            landed_ns=one.end_ns,
            payload_bytes=one.number(schema.ATTRIBUTE_PAYLOAD_BYTES),
        )
        for one in sent
    ]
    writes.sort(key=lambda write: (write.submitted_ns, write.layer))
    return Link(
        *(sent[0].span.worker_id, sent[0].number(schema.ATTRIBUTE_SOURCE_RANK)),
        *(destination, sent[0].number(schema.ATTRIBUTE_DESTINATION_RANK)),
        transport=_joined(sent, schema.ATTRIBUTE_TRANSPORT),
        strategy=_joined(sent, schema.ATTRIBUTE_STRATEGY),
        payload_bytes=sum(write.payload_bytes for write in writes),
        moving_ns=_covered_ns(writes),
        runs=sum(one.number(schema.ATTRIBUTE_RUNS) for one in sent),
        entries=sum(one.number(schema.ATTRIBUTE_ENTRIES) for one in sent),
        writes=tuple(writes),
    )


def _covered_ns(writes: Iterable[LayerWrite]) -> int:
    """Time in which at least one write was on the way. `writes` is by submission."""
    covered = reached = 0
    for number, write in enumerate(writes):
        start = write.submitted_ns if number == 0 else max(write.submitted_ns, reached)
        covered += max(0, write.landed_ns - start)
        reached = max(reached, write.landed_ns) if number else write.landed_ns
    return covered


def _joined(sent: Iterable[TimedSpan], attribute: str) -> str:
    return "+".join(sorted({one.text(attribute) for one in sent} - {""}))
