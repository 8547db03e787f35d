"""Spans of one process. Much cheaper than those of OpenTelemetry's SDK, and with the same interface.

A span becomes one plain value when it ends. Nothing is encoded before an exporter sends it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from headrace_common.telemetry.sampler import Sampler

SpanEvent: TypeAlias = tuple[str, int, Mapping[str, AttributeValue]]
"""A name, a time in Unix nanoseconds, and attributes."""

SpanLink: TypeAlias = tuple[int, int]
"""The trace id and the span id of a related span that is no parent."""

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_NOT_SAMPLED: Final = TraceFlags(TraceFlags.DEFAULT)
_NO_STATE: Final = TraceState()
_DEFAULT_SAMPLER: Final = Sampler()


@dataclass(frozen=True, slots=True)
class SpanSource:
    """The process, or the worker of a process, that makes spans. `service` is such as "router"."""

    service: str
    instance: str
    resource: Resource


class EndedSpan(NamedTuple):
    """A span that has ended. A nonempty `error` means that it failed. `parent_id` is 0 for a root."""

    trace_id: int
    span_id: int
    parent_id: int
    name: str
    start_unix_ns: int
    end_unix_ns: int
    attributes: Mapping[str, AttributeValue]
    error: str
    events: tuple[SpanEvent, ...]
    links: tuple[SpanLink, ...] = ()


SpanSink: TypeAlias = Callable[[SpanSource, EndedSpan], None]
"""Receives every span that has ended, in the thread that ended it. It must not block."""


class RecordedSpan(trace.Span):
    """A span that has started. Not thread-safe, unlike those of the SDK."""

    __slots__ = (
        "_attributes",
        "_context",
        "_ended",
        "_error",
        "_events",
        "_links",
        "_parent_id",
        "_sink",
        "name",
        "start_unix_ns",
    )

    def __init__(
        self,
        name: str,
        context: SpanContext,
        parent_id: int,
        start_unix_ns: int,
        attributes: dict[str, AttributeValue],
        sink: Callable[[EndedSpan], None],
    ) -> None:
        self.name = name
        self.start_unix_ns = start_unix_ns
        self._context = context
        self._parent_id = parent_id
        self._attributes = attributes
        self._sink = sink
        self._error = ""
        self._events: tuple[SpanEvent, ...] = ()
        self._links: tuple[SpanLink, ...] = ()
        self._ended = False

    def get_span_context(self) -> SpanContext:
        return self._context

    def is_recording(self) -> bool:
        return not self._ended

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        self._attributes.update(attributes)

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        self._attributes[key] = value

    def update_name(self, name: str) -> None:
        self.name = name

    def add_event(
        self,
        name: str,
        attributes: Mapping[str, AttributeValue] | None = None,
        timestamp: int | None = None,
    ) -> None:
        self._events += ((name, timestamp or time.time_ns(), attributes or {}),)

    def add_link(
        self, context: SpanContext, attributes: Mapping[str, AttributeValue] | None = None
    ) -> None:
        """Relates the span to another one. The attributes of links are not kept."""
        self._links += ((context.trace_id, context.span_id),)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        if not isinstance(status, Status):
            status = Status(status, description)
        self._error = "" if status.is_ok else status.description or "failed"

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, AttributeValue] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Adds the exception as an event."""
        details = {"exception.type": type(exception).__qualname__, **(attributes or {})}
        self.add_event("exception", details, timestamp)

    def end(self, end_time: int | None = None) -> None:
        """Passes the span on. Repeats are ignored."""
        if self._ended:
            return
        self._ended = True
        context = self._context
        self._sink(
            EndedSpan(
                context.trace_id,
                context.span_id,
                self._parent_id,
                self.name,
                self.start_unix_ns,
                end_time or time.time_ns(),
                self._attributes,
                self._error,
                self._events,
                self._links,
            )
        )


class SpanTracer:
    """Makes spans, of the traces that its sampler chooses."""

    def __init__(self, source: SpanSource, sampler: Sampler = _DEFAULT_SAMPLER) -> None:
        self.source = source
        self.sampler = sampler
        self._sinks: tuple[SpanSink, ...] = ()

    def add_sink(self, sink: SpanSink) -> None:
        """`sink` receives every span that ends from now on."""
        self._sinks = (*self._sinks, sink)

    def start_span(
        self,
        name: str,
        context: Context | trace.Span | None = None,
        *,
        attributes: Mapping[str, AttributeValue] | None = None,
        start_time: int | None = None,
    ) -> trace.Span:
        """A span with the parent `context`, or the span in it, or else the current one. A root without one."""
        parent = _span_of(context).get_span_context()
        own, parent_id = self._new_context(parent), parent.span_id if parent.is_valid else 0
        if not own.trace_flags.sampled:
            return trace.NonRecordingSpan(own)
        started = start_time or time.time_ns()
        return RecordedSpan(name, own, parent_id, started, dict(attributes or {}), self._pass_on)

    def record(
        self,
        name: str,
        parent: Context | trace.Span | None,
        times_unix_ns: tuple[int, int],
        attributes: Mapping[str, AttributeValue],
        error: str,
        events: tuple[SpanEvent, ...],
    ) -> None:
        """Records a span that has ended, with its start and its end."""
        context = _span_of(parent).get_span_context()
        trace_id, parent_id = context.trace_id, context.span_id
        if context.is_valid:
            if not self.sampler.samples(trace_id, context.trace_flags.sampled):
                return
        else:
            trace_id, parent_id = _new_id(128), 0
            if not self.sampler.samples(trace_id, None):
                return
        start, end = times_unix_ns
        end = max(start, end)
        # By position: names of arguments take as long as the rest. No other span needs this one's context.
        own_id = _new_id(64)
        self._pass_on(
            EndedSpan(trace_id, own_id, parent_id, name, start, end, attributes, error, events, ())
        )

    def _new_context(self, parent: SpanContext) -> SpanContext:
        """The ids of a new span, and whether it is recorded. One that is not has its parent's ids, if there is one."""
        if not parent.is_valid:
            trace_id = _new_id(128)
            flags = _SAMPLED if self.sampler.samples(trace_id, None) else _NOT_SAMPLED
            return SpanContext(trace_id, _new_id(64), False, flags, _NO_STATE)
        if not self.sampler.samples(parent.trace_id, parent.trace_flags.sampled):
            if not parent.trace_flags.sampled:
                return parent
            return SpanContext(
                *(parent.trace_id, parent.span_id, False, _NOT_SAMPLED, parent.trace_state)
            )
        flags = parent.trace_flags if parent.trace_flags.sampled else _SAMPLED
        return SpanContext(parent.trace_id, _new_id(64), False, flags, parent.trace_state)

    def _pass_on(self, span: EndedSpan) -> None:
        for sink in self._sinks:
            sink(self.source, span)


def _span_of(parent: Context | trace.Span | None) -> trace.Span:
    # Context is a dict, and an abstract class is slow to ask.
    if parent is None or isinstance(parent, dict):
        return trace.get_current_span(parent)
    return parent


def _new_id(bits: int) -> int:
    """A random id, never 0, which would be invalid."""
    while True:
        if value := random.getrandbits(bits):
            return value
