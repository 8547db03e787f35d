"""The root span of a request's trace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from headrace_common.errors import HeadraceError
from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import breakdown_attributes, sum_attributes
from headrace_common.telemetry.setup import Telemetry
from headrace_router.tracing.store import TraceStore
from headrace_router.tracing.timeline import RequestTimeline
from headrace_router.tracing.worker_clocks import WorkerClocks


class RequestTracer:
    """Starts the traces of requests, and their records in the trace store."""

    def __init__(self, telemetry: Telemetry, store: TraceStore, clocks: WorkerClocks) -> None:
        self._telemetry = telemetry
        self._store = store
        self._clocks = clocks

    def new_timeline(self, arrival_ns: int) -> RequestTimeline:
        """The timeline of a request that arrived at `arrival_ns` of the monotonic clock."""
        return RequestTimeline(self._clocks, arrival_ns)

    @contextmanager
    def request_span(
        self,
        request_id: str,
        arrival_unix_ns: int,
        *,
        stored: bool = True,
        timeline: RequestTimeline | None = None,
    ) -> Iterator[Span]:
        """The root span, over the block. It carries the error that the block raises, and the parts of the latency.

        `stored`: whether the trace store keeps the trace. The span may be passed on a moment after the block, when the
        prefill worker has reported.
        """
        root = self._telemetry.tracer.start_span(
            schema.SPAN_REQUEST,
            start_time=arrival_unix_ns,
            attributes={schema.ATTRIBUTE_REQUEST_ID: request_id},
        )
        if stored:
            self._store.start_trace(trace_id_of(root), request_id, arrival_unix_ns)
        try:
            yield root
        except HeadraceError as error:
            root.set_status(Status(StatusCode.ERROR, error.detail))
            root.set_attribute(schema.ATTRIBUTE_ERROR_REASON, error.reason)
            raise
        except asyncio.CancelledError:
            root.set_status(Status(StatusCode.ERROR, "the client gave the request up"))
            raise
        finally:
            if timeline is None or not root.is_recording():
                root.end()
            else:
                end_unix_ns, known = time.time_ns(), timeline
                timeline.when_reported(lambda: self._end(root, known, end_unix_ns))

    def _end(self, root: Span, timeline: RequestTimeline, end_unix_ns: int) -> None:
        breakdown = timeline.break_down()
        self._store.add_clocks(trace_id_of(root), timeline.differences())
        root.set_attributes(breakdown_attributes(breakdown))
        response = timeline.response
        if response is not None and breakdown.second is not None:
            self._telemetry.record_span(
                schema.SPAN_SECOND_TOKEN,
                trace.set_span_in_context(root),
                response.first_token_unix_ns,
                response.second_token_unix_ns,
                sum_attributes(breakdown.second),
            )
        root.end(end_unix_ns)


def trace_id_of(span: Span) -> str:
    """The trace id of a span, as 32 hex characters."""
    return trace.format_trace_id(span.get_span_context().trace_id)
