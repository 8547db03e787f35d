"""W3C trace context in gRPC metadata and in messages, and the call that a task serves."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final, NamedTuple

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace_common.latency.clocks import ClockPair
from headrace_common.rpc import handlers

_PROPAGATOR = TraceContextTextMapPropagator()
# The traceparent of our own services. The propagator takes three times as long for it.
_PLAIN: Final = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class ServedCall(NamedTuple):
    """An RPC such as "package.Service/Method", or an HTTP request with its route. `http_method` is empty for an RPC.

    `fetch` is from when to when the images of a request were fetched, before the request could run.
    """

    name: str
    http_method: str = ""
    fetch: tuple[ClockPair, ClockPair] | None = None


SERVED: Final[ContextVar[ServedCall | None]] = ContextVar("served", default=None)
"""The call that the current task serves. Set where a call arrives. Tasks that the call starts have it too."""


def context_from_traceparent(text: str) -> Context:
    """The context of the span that the traceparent `text` names. Empty when it names none."""
    return context_of_carrier(text, "")


def carrier_of(span: SpanContext) -> dict[str, str]:
    """The trace context of a span, as traceparent and tracestate. Empty for an invalid span.

    It is as the propagator has it, which takes three times as long.
    """
    trace_id, span_id, _, flags, state, is_valid = span
    if not is_valid:
        return {}
    carrier = {"traceparent": f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"}
    if state:
        carrier["tracestate"] = state.to_header()
    return carrier


def context_of_carrier(traceparent: str, tracestate: str) -> Context:
    """The context of the span that `carrier_of` described. Empty for none."""
    if not traceparent:
        return Context()
    plain = None if tracestate else _PLAIN.fullmatch(traceparent)
    if plain is None:
        carrier = {"traceparent": traceparent, "tracestate": tracestate}
        return _PROPAGATOR.extract(carrier, context=Context())
    trace_id, span_id, flags = (int(digits, 16) for digits in plain.groups())
    parent = SpanContext(trace_id, span_id, True, TraceFlags(flags))
    if not parent.is_valid:
        return Context()
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())


class TraceInterceptor(handlers.WrappingInterceptor):
    """Makes the caller's span the current span while a handler runs, and the RPC the served call."""

    def wrap(self, handler: handlers.Handler, method: str) -> handlers.Handler:
        call = ServedCall(method.removeprefix("/"))
        return handlers.guarded(handler, lambda context: _inside_callers_span(context, call))


@asynccontextmanager
async def _inside_callers_span(context: handlers.Context, call: ServedCall) -> AsyncIterator[None]:
    carrier = {
        key: value
        for key, value in context.invocation_metadata() or ()
        if key in ("traceparent", "tracestate") and isinstance(value, str)
    }
    # Neither is undone. Each RPC runs in a task of its own, and both end with the task.
    # Another task may close an asynchronous generator, and detaching would fail there.
    SERVED.set(call)
    otel_context.attach(
        context_of_carrier(carrier.get("traceparent", ""), carrier.get("tracestate", ""))
    )
    yield
