"""The root span of a request of this worker's own client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from headrace_common.errors import HeadraceError
from headrace_common.logs import TRACE_NAMES
from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import breakdown_attributes, gen_ai_attributes
from headrace_common.telemetry.served import server_attributes
from headrace_common.telemetry.setup import Telemetry
from headrace_decode.http.timeline import OwnTimeline


@contextmanager
def request_span(
    telemetry: Telemetry, request_id: str, arrival_unix_ns: int, timeline: OwnTimeline
) -> Iterator[Span]:
    """The root span, over the block, in the trace of the caller.

    It carries the error that the block raises, and the parts of the latency. It may be passed on a moment after the
    block, when a router has reported the prefill.
    """
    root = telemetry.start_span(
        schema.SPAN_REQUEST,
        start_unix_ns=arrival_unix_ns,
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
        end_unix_ns = time.time_ns()
        if root.is_recording():
            timeline.when_reported(partial(_end, root, timeline, arrival_unix_ns, end_unix_ns))
        else:
            root.end(end_unix_ns)


def _end(root: Span, timeline: OwnTimeline, arrival_unix_ns: int, end_unix_ns: int) -> None:
    breakdown, response = timeline.break_down(), timeline.response
    root.set_attributes(breakdown_attributes(breakdown))
    if response is not None and response.started:
        root.set_attributes(gen_ai_attributes(breakdown, end_unix_ns - arrival_unix_ns))
    root.end(end_unix_ns)


def trace_id_of(span: Span) -> str:
    """The trace id of a span, as 32 hex characters."""
    return trace.format_trace_id(span.get_span_context().trace_id)
