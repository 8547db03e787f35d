"""The root span of a request of this worker's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from headrace_common.errors import HeadraceError
from headrace_common.logs import TRACE_NAMES
from headrace_common.telemetry import schema
from headrace_common.telemetry.served import server_attributes
from headrace_common.telemetry.setup import Telemetry


@contextmanager
def request_span(telemetry: Telemetry, request_id: str, arrival_unix_ns: int) -> Iterator[Span]:
    """The root span, over the block, in the trace of the caller. It carries the error that the block raises."""
    root = telemetry.tracer.start_span(
        schema.SPAN_REQUEST,
        start_time=arrival_unix_ns,
        attributes={schema.ATTRIBUTE_REQUEST_ID: request_id, **server_attributes()},
    )
    TRACE_NAMES.add(request_id, root.get_span_context())
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
