"""W3C trace context in gRPC metadata and in messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import grpc.aio
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace_common.rpc import handlers

_PROPAGATOR = TraceContextTextMapPropagator()


def traceparent(span: Span) -> str:
    """The W3C traceparent of a span, to be stored in a message; empty for an invalid span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(span))
    return carrier.get("traceparent", "")


def context_from_traceparent(text: str) -> Context:
    """The context whose span is the one that `text` names; an empty one when it names none."""
    return _PROPAGATOR.extract({"traceparent": text}, context=Context())


def metadata_with_trace(
    metadata: Sequence[tuple[str, str | bytes]] = (), context: Context | None = None
) -> tuple[tuple[str, str | bytes], ...]:
    """Metadata for an RPC that carries the current span, or that of `context`, to the server."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return (*metadata, *carrier.items())


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """Makes the caller's span the current one while a handler runs."""

    async def intercept_service(
        self,
        continuation: handlers.Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> handlers.Handler | None:
        """Wraps the handler found by `continuation`."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return handlers.guarded(handler, _inside_callers_span)


@asynccontextmanager
async def _inside_callers_span(context: handlers.Context) -> AsyncIterator[None]:
    carrier = {
        key: value
        for key, value in context.invocation_metadata() or ()
        if key in ("traceparent", "tracestate") and isinstance(value, str)
    }
    # Never detached: each RPC runs in a task of its own, and the attachment ends with it. An
    # asynchronous generator may be closed from another task, where detaching would fail.
    otel_context.attach(_PROPAGATOR.extract(carrier, context=Context()))
    yield
