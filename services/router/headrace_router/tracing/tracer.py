"""Stores a record of each request of a router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace_frontend.running.timeline import RequestTimeline
from headrace_frontend.running.tracer import RequestRecord, RequestTracer
from headrace_router.tracing.request_record import Regret, RoutedRecord
from headrace_router.tracing.store import TraceStore


@dataclass(eq=False)
class StoringTracer(RequestTracer):
    """Stores a record of each request, and makes spans of those that are sampled, slow or failed."""

    record_type = RoutedRecord

    store: TraceStore
    """See TraceStore.keep."""
    on_regret: Callable[[str, Regret], None] = field(default=lambda _, __: None, kw_only=True)
    """Gets the model and the regret of a request."""

    def _start_stored(self, trace_id: str, request_id: str, timeline: RequestTimeline) -> None:
        self.store.start_trace(trace_id, request_id, timeline.arrival_unix_ns)

    def _complete(self, record: RequestRecord, *, stored: bool, kept: bool) -> None:
        assert isinstance(record, RoutedRecord)
        regret = record.regret
        if regret is not None:
            self.on_regret(regret.other.worker.model, regret)
        if stored:
            self.store.end_request(record)
            if kept:
                self.store.keep(record.trace_id)
