"""Requests that stream from decode workers directly: until they end, they count as admitted.

The decode worker's span, which every router receives, marks the end of a request and completes its trace. The trace
then has the sum up to the first token. Without that span a request counts until its ticket expires. It counts longer
while its worker reports more requests than this router has placed there itself.

A client may ask for tickets and never use them. So the tickets of one caller are bounded as long as the router has not
seen their use: the handover of their prompt, or their end.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from opentelemetry.proto.trace.v1 import trace_pb2 as otlp_pb2

from headrace.inference.v1 import inference_pb2
from headrace_common.rpc.trace_context import context_from_traceparent
from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import breakdown_attributes
from headrace_common.telemetry.setup import Telemetry
from headrace_frontend.admission.admission import AdmissionPermit
from headrace_kv.layout.layout import WorkerRef
from headrace_router.lookaside.direct_timeline import DirectTimeline, RouteTimes, SpanTimes
from headrace_router.tracing.batches import SpanBatch, attributes_as_text
from headrace_router.tracing.timeline import AttemptTimeline
from headrace_router.tracing.worker_clocks import ClockDifference, WorkerClocks
from headrace_router.workers.directory import WorkerDirectory

_SWEEP_S: Final = 1.0
_STEP_SPANS: Final = (
    schema.SPAN_DECODE_RESERVE,
    schema.SPAN_DECODE_KV_WAIT,
    schema.SPAN_DECODE_FIRST_TOKEN,
    schema.SPAN_DECODE_GENERATE,
)
_DECODE_SPANS: Final = frozenset((schema.SPAN_DECODE, *_STEP_SPANS))
# Attempts with spans, of one trace that a client uses again and again.
_PARENTS_MAX: Final = 16

OnClocks: TypeAlias = Callable[[str, Mapping[str, ClockDifference]], None]
"""Gets a trace id, and how far workers' clocks are ahead of the router's, by worker id."""


@dataclass(slots=True)
class _DirectRequest:
    trace_id: bytes
    ref: WorkerRef
    traceparent: str
    caller: str
    permit: AdmissionPermit
    release: Callable[[], None]
    route: RouteTimes
    timeline: DirectTimeline
    expire_monotonic_s: float
    end_monotonic_s: float
    confirmed: bool = False
    steps: dict[bytes, dict[str, SpanTimes]] = field(default_factory=dict)
    """The spans of the decode worker's steps in this trace, by their parent and name."""

    def confirm(self) -> None:
        self.confirmed = True

    def add_step(self, span: otlp_pb2.Span) -> None:
        if span.parent_span_id not in self.steps and len(self.steps) >= _PARENTS_MAX:
            del self.steps[next(iter(self.steps))]
        self.steps.setdefault(span.parent_span_id, {})[span.name] = _times_of(span)


class DirectRequestTracker:
    """Tracks direct requests. One event loop owns it.

    `ttl_s` is the lifetime of a ticket, `longest_s` that of a request without a deadline. `max_unused` bounds the
    unconfirmed tickets of a caller.
    """

    def __init__(
        self,
        workers: WorkerDirectory,
        telemetry: Telemetry,
        *,
        ttl_s: float,
        longest_s: float,
        max_unused: int,
        clocks: WorkerClocks,
        on_clocks: OnClocks,
    ) -> None:
        self._workers = workers
        self._telemetry = telemetry
        self._ttl_s = ttl_s
        self._longest_s = max(ttl_s, longest_s)
        self._max_unused = max_unused
        self._clocks = clocks
        self._on_clocks = on_clocks
        self._unused: Counter[str] = Counter()
        self._requests: dict[str, _DirectRequest] = {}
        self._transfer_of_trace: dict[bytes, str] = {}
        self._sweep_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def has_room(self, caller: str) -> bool:
        """Whether the caller may get another ticket."""
        return self._unused[caller] < self._max_unused

    def track(
        self,
        direct: inference_pb2.DirectRequest,
        ref: WorkerRef,
        caller: str,
        permit: AdmissionPermit,
        release: Callable[[], None],
        route: RouteTimes,
    ) -> None:
        """Tracks a request with a granted ticket. Calls `release` once, when it has ended or was never sent."""
        now_s = time.monotonic()
        trace_id = bytes.fromhex(direct.traceparent.split("-")[1])
        self._requests[direct.transfer_id] = _DirectRequest(
            trace_id=trace_id,
            ref=ref,
            traceparent=direct.traceparent,
            caller=caller,
            permit=permit,
            release=release,
            route=route,
            timeline=DirectTimeline(route),
            expire_monotonic_s=now_s + self._ttl_s,
            end_monotonic_s=now_s + self._longest_s,
        )
        self._unused[caller] += 1
        self._transfer_of_trace[trace_id] = direct.transfer_id
        if self._sweep_timer is None:
            self._sweep_timer = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)

    def permit(self, transfer_id: str) -> AdmissionPermit | None:
        """The permit of a tracked request. None when the request is not tracked any more."""
        request = self._requests.get(transfer_id)
        return None if request is None else request.permit

    def prefilling(self, transfer_id: str, timeline: AttemptTimeline, arrival_ns: int) -> None:
        """The client's Prefill call arrived at `arrival_ns` of the monotonic clock. Ignored for unknown requests."""
        request = self._requests.get(transfer_id)
        if request is not None:
            request.timeline.prefilling(timeline, arrival_ns)

    def confirm(self, transfer_id: str) -> None:
        """The prompt of a request was handed over, so its decode worker has the request."""
        request = self._requests.get(transfer_id)
        if request is not None and not request.confirmed:
            request.confirm()
            self._count_used(request.caller)

    def on_batch(self, batch: SpanBatch) -> None:
        """Processes workers' spans. Spans of other requests are ignored."""
        if not self._requests:
            return
        for span in batch.spans:
            if span.name in _DECODE_SPANS and span.trace_id in self._transfer_of_trace:
                parsed = span.parse()
                if parsed is not None:
                    self._on_decode_span(parsed)

    def close(self) -> None:
        """Releases all requests."""
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for transfer_id in tuple(self._requests):
            self._end(transfer_id)

    def _on_decode_span(self, span: otlp_pb2.Span) -> None:
        transfer_id = self._transfer_of_trace[span.trace_id]
        newest = self._requests[transfer_id]
        if span.name != schema.SPAN_DECODE:
            newest.add_step(span)
            return
        # One trace of a client may contain several requests.
        attributes = attributes_as_text(span.attributes)
        own_id = attributes.get(schema.ATTRIBUTE_TRANSFER_ID, transfer_id)
        steps = newest.steps.pop(span.span_id, {})
        request = self._requests.get(own_id)
        if request is not None and request.trace_id == span.trace_id:
            self._record_tokens(request, {**steps, span.name: _times_of(span)})
        self._end(own_id)

    def _record_tokens(self, request: _DirectRequest, spans: Mapping[str, SpanTimes]) -> None:
        """Records the spans up to the first token and after it, on the router's clock."""
        ref = request.ref
        live = self._workers.worker(ref) is not None
        found = request.timeline.sum_of(
            spans,
            ref.worker_id,
            self._clocks.clock(ref.worker_id),
            self._workers.unix_ns(ref.worker_id, ref.incarnation) if live else None,
        )
        if found is None:
            return
        answer = spans[schema.SPAN_DECODE_GENERATE]
        parent = context_from_traceparent(request.traceparent)
        first_ns = found.first_unix_ns
        record = self._telemetry.record_span
        record(
            schema.SPAN_FIRST_TOKEN,
            parent,
            request.route.arrival_unix_ns,
            first_ns,
            breakdown_attributes(found.breakdown),
        )
        last_ns = first_ns + answer.end_ns - answer.start_ns
        record(schema.SPAN_STREAM, parent, first_ns, last_ns)
        self._on_clocks(request.trace_id.hex(), found.differences)

    def _sweep(self) -> None:
        now_s = time.monotonic()
        expired: dict[WorkerRef, list[str]] = {}
        for transfer_id, request in tuple(self._requests.items()):
            if now_s >= request.end_monotonic_s:
                self._end(transfer_id)
            elif now_s >= request.expire_monotonic_s:
                expired.setdefault(request.ref, []).append(transfer_id)
        for ref, transfer_ids in expired.items():
            external_count = self._workers.external_request_count(ref)
            ended_count = max(0, len(transfer_ids) - external_count)
            for transfer_id in transfer_ids[:ended_count]:
                self._end(transfer_id)
        loop = asyncio.get_running_loop()
        self._sweep_timer = loop.call_later(_SWEEP_S, self._sweep) if self._requests else None

    def _end(self, transfer_id: str) -> None:
        request = self._requests.pop(transfer_id, None)
        if request is not None:
            if self._transfer_of_trace.get(request.trace_id) == transfer_id:
                del self._transfer_of_trace[request.trace_id]
            if not request.confirmed:
                self._count_used(request.caller)
            request.release()

    def _count_used(self, caller: str) -> None:
        self._unused[caller] -= 1
        if not self._unused[caller]:
            del self._unused[caller]


def _times_of(span: otlp_pb2.Span) -> SpanTimes:
    waits = (
        pair.value.double_value
        for pair in span.attributes
        if pair.key == schema.ATTRIBUTE_DECODE_WAIT_MS
    )
    wait_ns = round(1e6 * next(waits, 0.0))
    return SpanTimes(span.start_time_unix_nano, span.end_time_unix_nano, wait_ns)
