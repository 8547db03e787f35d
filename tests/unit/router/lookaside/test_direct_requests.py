"""Requests that stream from decode workers directly: how their tracking ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from headrace.inference.v1 import inference_pb2
from headrace_common.telemetry import schema
from headrace_kv.layout.layout import WorkerRef
from headrace_router.lookaside.direct_timeline import RouteTimes
from headrace_router.lookaside.tracking import DirectRequestTracker
from headrace_router.tracing.batches import SpanBatch, read_span
from headrace_router.tracing.worker_clocks import WorkerClocks

_REF = WorkerRef("d0", "a")
_ROUTE = RouteTimes(0, 0, (0, 0), 0, 0)


class _Workers:
    def __init__(self, external_requests: int) -> None:
        self.external_requests = external_requests

    def worker(self, ref: WorkerRef) -> None:
        """It has left."""

    def external_request_count(self, ref: WorkerRef) -> int:
        assert ref == _REF
        return self.external_requests


def _tracker(released: list[str], names: str, external_requests: int) -> DirectRequestTracker:
    """Tracks requests with these names and expired tickets."""
    workers: Any = _Workers(external_requests)
    unused: Any = None
    tracker = DirectRequestTracker(
        *(workers, unused),
        ttl_s=0.0,
        longest_s=60.0,
        max_unused=2,
        clocks=WorkerClocks(),
        on_clocks=unused,
    )
    for name in names:
        direct = inference_pb2.DirectRequest(
            transfer_id=name, traceparent=f"00-{ord(name):032x}-{1:016x}-01"
        )
        release = partial(released.append, name)
        tracker.track(direct, _REF, f"caller of {name}", unused, release, _ROUTE)
    return tracker


def _spans(transfer_id: str, name: str) -> SpanBatch:
    attribute = common_pb2.KeyValue(
        key=schema.ATTRIBUTE_TRANSFER_ID, value=common_pb2.AnyValue(string_value=transfer_id)
    )
    trace_id = ord(transfer_id).to_bytes(16, "big")
    span = trace_pb2.Span(name=name, trace_id=trace_id, attributes=[attribute])
    return SpanBatch("decode", "d0", [read_span(span.SerializeToString())])


@pytest.mark.parametrize("external_requests,ended", [(0, 3), (1, 2), (3, 0), (4, 0)])
async def test_expired_requests_beyond_those_that_the_worker_reports_end(
    external_requests: int, ended: int
) -> None:
    released: list[str] = []
    tracker = _tracker(released, "abc", external_requests)
    tracker._sweep()
    assert released == ["a", "b", "c"][:ended]
    assert len(tracker) == 3 - ended
    tracker.close()
    assert released == ["a", "b", "c"]


async def test_spans_of_an_ended_request_are_ignored() -> None:
    released: list[str] = []
    tracker = _tracker(released, "ab", 2)
    for name in (schema.SPAN_DECODE, schema.SPAN_DECODE_GENERATE, schema.SPAN_DECODE):
        tracker.on_batch(_spans("a", name))
    assert released == ["a"]
    assert len(tracker) == 1
    tracker.close()


async def test_unused_tickets_of_one_caller_are_bounded() -> None:
    released: list[str] = []
    tracker = _tracker(released, "", 0)
    workers: Any = None

    def track(name: str, caller: str) -> None:
        direct = inference_pb2.DirectRequest(
            transfer_id=name, traceparent=f"00-{ord(name):032x}-{1:016x}-01"
        )
        tracker.track(direct, _REF, caller, workers, partial(released.append, name), _ROUTE)

    for name in "ab":
        assert tracker.has_room("one")
        track(name, "one")
    assert not tracker.has_room("one")
    assert tracker.has_room("other")
    # A handover makes room once, and an end after it makes no more.
    for _ in range(2):
        tracker.confirm("a")
    track("c", "one")
    assert not tracker.has_room("one")
    tracker.on_batch(_spans("a", schema.SPAN_DECODE))
    assert not tracker.has_room("one")
    tracker.on_batch(_spans("b", schema.SPAN_DECODE))
    assert tracker.has_room("one")
    tracker.confirm("unknown")
    tracker.close()
    assert released == ["a", "b", "c"]
    assert not tracker._unused
