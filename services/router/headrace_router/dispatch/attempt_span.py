"""The trace of one attempt: its span, and the spans of its reservation and of its time in the prefill queue."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode

from headrace_common.errors import HeadraceError
from headrace_common.logs import TRACE_NAMES
from headrace_common.rpc.trace_context import traceparent
from headrace_common.telemetry import schema
from headrace_common.telemetry.recorded_span import recorded_span
from headrace_common.telemetry.setup import Telemetry
from headrace_router.dispatch.request import RoutedRequest
from headrace_router.placement import Decision
from headrace_router.prefill_queue.task import QueuedTask

_METHOD: Final = "headrace.decode.v1.DecodeService/Link"


class AttemptSpan:
    """Starts with the attempt, linked to the one before it. `end` must follow."""

    def __init__(
        self,
        telemetry: Telemetry,
        request: RoutedRequest,
        decision: Decision,
        *,
        number: int,
        transfer_id: str,
    ) -> None:
        self._telemetry = telemetry
        address, _, port = decision.worker.endpoint.rpartition(":")
        self._span = telemetry.tracer.start_span(
            schema.SPAN_ATTEMPT,
            context=request.root_span,
            attributes={
                schema.ATTRIBUTE_ATTEMPT: number,
                schema.ATTRIBUTE_TRANSFER_ID: transfer_id,
                schema.ATTRIBUTE_REQUEST_ID: request.prepared.request_id,
                schema.ATTRIBUTE_DECODE_WORKER_ID: decision.worker.ref.worker_id,
                schema.ATTRIBUTE_PLACEMENT: "remote" if decision.remote else "local",
                schema.ATTRIBUTE_GENERATED_TOKENS: request.response.completion_tokens,
                schema.ATTRIBUTE_RPC_SYSTEM: "grpc",
                schema.ATTRIBUTE_RPC_METHOD: _METHOD,
                schema.ATTRIBUTE_SERVER_ADDRESS: address.strip("[]"),
                schema.ATTRIBUTE_SERVER_PORT: int(port) if port.isdecimal() else 0,
            },
        )
        for previous in request.timeline.span_contexts[-1:]:
            self._span.add_link(previous)
        request.timeline.attempt_traced(self._span.get_span_context())
        TRACE_NAMES.add(transfer_id, self._span.get_span_context())
        self.context: Context = trace.set_span_in_context(self._span)

    @property
    def traceparent(self) -> str:
        """The W3C header of this span, for a message that is stored."""
        return traceparent(self._span)

    def recorded_reservation(self) -> AbstractContextManager[Any]:
        """Records the reservation span over the block."""
        return recorded_span(self._telemetry, schema.SPAN_RESERVE, self._span)

    def fail(self, error: HeadraceError) -> None:
        """Marks the attempt as failed."""
        self._span.set_status(Status(StatusCode.ERROR, error.detail))
        self._span.set_attribute(schema.ATTRIBUTE_ERROR_REASON, error.reason)

    def end(self, queued: QueuedTask | None) -> None:
        """Ends the span, and records the queue span of the attempt's prefill task."""
        if queued is not None:
            self._record_queue_span(queued)
            if queued.worker is not None:
                self._span.set_attribute(
                    schema.ATTRIBUTE_PREFILL_WORKER_ID, queued.worker.worker_id
                )
        self._span.end()

    def _record_queue_span(self, queued: QueuedTask) -> None:
        self._telemetry.record_span(
            schema.SPAN_QUEUE,
            self._span,
            queued.queued_unix_ns,
            queued.pulled_unix_ns or time.time_ns(),
            {
                schema.ATTRIBUTE_QUEUE_DEPTH: queued.tasks_ahead,
                schema.ATTRIBUTE_PRIORITY: queued.priority.label,
            },
            "" if queued.pulled_unix_ns else "never pulled",
        )


def route_attributes(decision: Decision) -> dict[str, str]:
    """The attributes of the span of a choice of workers."""
    return {
        schema.ATTRIBUTE_DECODE_WORKER_ID: decision.worker.ref.worker_id,
        schema.ATTRIBUTE_PLACEMENT: "remote" if decision.remote else "local",
        schema.ATTRIBUTE_EXPLANATION: decision.explanation,
        schema.ATTRIBUTE_CANDIDATES: "; ".join(map(str, decision.candidates)),
    }
