"""The root span of a request's trace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from headrace_common.errors import HeadraceError
from headrace_common.latency.breakdown import Breakdown
from headrace_common.logs import TRACE_NAMES
from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import (
    breakdown_attributes,
    gen_ai_attributes,
    sum_attributes,
)
from headrace_common.telemetry.served import server_attributes
from headrace_common.telemetry.setup import Telemetry
from headrace_common.telemetry.spans import EndedSpan
from headrace_frontend.request.response_stream import ResponseStream
from headrace_router.tracing.store import TraceStore
from headrace_router.tracing.timeline import RequestTimeline
from headrace_router.tracing.worker_clocks import WorkerClocks, clock_attributes

_GIVEN_UP: Final = "the client gave the request up"


class RequestTracer:
    """Starts the traces of requests, and their records in the trace store."""

    def __init__(
        self,
        telemetry: Telemetry,
        store: TraceStore,
        clocks: WorkerClocks,
        *,
        slow_s: float = 0.0,
        on_latency: Callable[[ResponseStream, Breakdown], None] = lambda _, __: None,
    ) -> None:
        """`slow_s`: see TraceStore.keep. `on_latency` is called for each response that has started."""
        self._slow_s = slow_s
        self._on_latency = on_latency
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
        TRACE_NAMES.add(request_id, root.get_span_context())
        recorded = root.is_recording()
        if recorded:
            root.set_attributes(server_attributes())
        if stored and recorded:
            self._store.start_trace(trace_id_of(root), request_id, arrival_unix_ns)
        ending = _Ending(request_id, arrival_unix_ns, stored=stored, recorded=recorded)
        try:
            yield root
        except HeadraceError as error:
            root.set_status(Status(StatusCode.ERROR, error.detail))
            root.set_attribute(schema.ATTRIBUTE_ERROR_REASON, error.reason)
            ending.fail(error.detail, error.reason)
            raise
        except asyncio.CancelledError:
            root.set_status(Status(StatusCode.ERROR, _GIVEN_UP))
            ending.fail(_GIVEN_UP)
            raise
        finally:
            if timeline is None:
                root.end()
            else:
                ending.end_unix_ns, known = time.time_ns(), timeline
                timeline.when_reported(lambda: self._end(root, known, ending))

    def _end(self, root: Span, timeline: RequestTimeline, ending: _Ending) -> None:
        breakdown, response = timeline.break_down(), timeline.response
        if response is not None and response.started:
            self._on_latency(response, breakdown)
        slow = 0 < self._slow_s < 1e-6 * breakdown.first.total_us
        kept = ending.stored and (slow or bool(ending.error))
        if not (kept or ending.recorded):
            return
        trace_id, attributes = trace_id_of(root), breakdown_attributes(breakdown)
        if kept:
            if not ending.recorded:
                self._record_root(root, attributes, ending)
            self._store.keep(trace_id)
        if not ending.recorded:
            return
        differences = timeline.differences()
        self._store.add_clocks(trace_id, differences)
        root.set_attributes(attributes)
        root.set_attributes(clock_attributes(differences))
        if response is not None and response.started:
            duration_ns = ending.end_unix_ns - ending.start_unix_ns
            root.set_attributes(gen_ai_attributes(breakdown, duration_ns))
        if response is not None and breakdown.second is not None:
            self._telemetry.record_span(
                schema.SPAN_SECOND_TOKEN,
                root,
                response.first_token_unix_ns,
                response.second_token_unix_ns,
                sum_attributes(breakdown.second),
            )
        root.end(ending.end_unix_ns)

    def _record_root(
        self, root: Span, attributes: Mapping[str, AttributeValue], ending: _Ending
    ) -> None:
        """Stores the root span of a trace that was not sampled: it has the parts of the latency."""
        context, request_id = root.get_span_context(), ending.request_id
        self._store.start_trace(trace_id_of(root), request_id, ending.start_unix_ns)
        own = {schema.ATTRIBUTE_REQUEST_ID: request_id}
        if ending.reason:
            own[schema.ATTRIBUTE_ERROR_REASON] = ending.reason
        self._store.add_ended(
            self._telemetry.tracer.source,
            EndedSpan(
                *(context.trace_id, context.span_id, 0, schema.SPAN_REQUEST),
                *(ending.start_unix_ns, ending.end_unix_ns, {**own, **attributes}),
                *(ending.error, ()),
            ),
        )


@dataclass(slots=True)
class _Ending:
    """What is known of a request when its span ends."""

    request_id: str
    start_unix_ns: int
    stored: bool
    recorded: bool
    end_unix_ns: int = 0
    error: str = ""
    reason: str = ""

    def fail(self, error: str, reason: str = "") -> None:
        self.error, self.reason = error, reason


def trace_id_of(span: Span) -> str:
    """The trace id of a span, as 32 hex characters."""
    return trace.format_trace_id(span.get_span_context().trace_id)
