"""Stores a record of each request of a router."""

from __future__ import annotations

from collections.abc import Callable

from headrace_common.latency.breakdown import Breakdown
from headrace_common.telemetry.setup import Telemetry
from headrace_frontend.request.response_stream import ResponseStream
from headrace_frontend.running.timeline import RequestTimeline
from headrace_frontend.running.tracer import RequestRecord, RequestTracer
from headrace_router.tracing.request_record import Regret, RoutedRecord
from headrace_router.tracing.store import TraceStore


class StoringTracer(RequestTracer):
    """Stores a record of each request, and makes spans of those that are sampled, slow or failed."""

    record_type = RoutedRecord

    def __init__(
        self,
        telemetry: Telemetry,
        store: TraceStore,
        *,
        slow_s: float = 0.0,
        on_latency: Callable[[ResponseStream, Breakdown], None] = lambda _, __: None,
        on_regret: Callable[[str, Regret], None] = lambda _, __: None,
    ) -> None:
        """See RequestTracer, and TraceStore.keep. `on_regret` gets the model and the regret of a request."""
        super().__init__(telemetry, slow_s=slow_s, on_latency=on_latency)
        self._store = store
        self._on_regret = on_regret

    def _start_stored(self, trace_id: str, request_id: str, timeline: RequestTimeline) -> None:
        self._store.start_trace(trace_id, request_id, timeline.arrival_unix_ns)

    def _complete(self, record: RequestRecord, *, stored: bool, kept: bool) -> None:
        assert isinstance(record, RoutedRecord)
        regret = record.regret
        if regret is not None:
            self._on_regret(regret.other.worker.model, regret)
        if stored:
            self._store.end_request(record)
            if kept:
                self._store.keep(record.trace_id)
