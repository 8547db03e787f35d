"""The root span of a request's trace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from headrace_common.errors import HeadraceError
from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import Telemetry


class RequestTracer:
    """Starts the traces of requests.

    `start_record` gets the trace id, the request id and the arrival in Unix nanoseconds of each trace to store.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        start_record: Callable[[str, str, int], None] = lambda trace_id, request_id, start: None,
    ) -> None:
        self._telemetry = telemetry
        self._start_record = start_record

    @contextmanager
    def request_span(
        self, request_id: str, arrival_unix_ns: int, *, stored: bool = True
    ) -> Iterator[Span]:
        """The root span, over the block. It carries the error that the block raises.

        `stored`: whether the trace is stored.
        """
        root = self._telemetry.tracer.start_span(
            schema.SPAN_REQUEST,
            start_time=arrival_unix_ns,
            attributes={schema.ATTRIBUTE_REQUEST_ID: request_id},
        )
        if stored:
            self._start_record(trace_id_of(root), request_id, arrival_unix_ns)
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
            root.end()


def trace_id_of(span: Span) -> str:
    """The trace id of a span, as 32 hex characters."""
    return trace.format_trace_id(span.get_span_context().trace_id)
