"""Spans of OpenTelemetry's SDK that are made after the work that they show.

A request's ids have to be known when it starts. Whether it gets spans is known at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from headrace_common.telemetry.schema_tables import SPAN_KINDS

SCOPE = "headrace"
NO_RESOURCE: Final = Resource({})
_SCOPE = InstrumentationScope(SCOPE)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_ID_STEP: Final = 0x9E37_79B9_7F4A_7C15
_ID_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF


class SpanMaker:
    """Makes spans of one trace below its root. Each maker with the same arguments gives them the same ids."""

    def __init__(
        self,
        root: SpanContext,
        zero_unix_ns: int,
        resource: Resource = NO_RESOURCE,
        number: int = 0,
    ) -> None:
        """`zero_unix_ns` is the wall clock at 0 of the clock of the steps. Makers of one trace differ by `number`."""
        self.root = root
        self._zero_unix_ns = zero_unix_ns
        self._resource = resource
        self._last_id = root.span_id + (number << 32)

    def of_steps(
        self,
        name: str,
        parent: SpanContext,
        times_us: tuple[int, int],
        attributes: Mapping[str, AttributeValue] | None = None,
        error: str = "",
        *,
        context: SpanContext | None = None,
        link: SpanContext | None = None,
    ) -> ReadableSpan:
        """A span from the times of two steps."""
        start_ns, end_ns = (self._zero_unix_ns + 1_000 * time_us for time_us in times_us)
        times = (start_ns, end_ns)
        return self.at(name, parent, times, attributes, error, context=context, link=link)

    def at(
        self,
        name: str,
        parent: SpanContext | None,
        times_unix_ns: tuple[int, int],
        attributes: Mapping[str, AttributeValue] | None = None,
        error: str = "",
        *,
        context: SpanContext | None = None,
        link: SpanContext | None = None,
    ) -> ReadableSpan:
        """A span with the ids of `context`, or with new ones. It has failed if `error` is not empty.

        Exporters accept it, whether or not its trace was sampled.
        """
        start_ns, end_ns = times_unix_ns
        own = context or self.root
        if context is None:
            self._last_id = (self._last_id + _ID_STEP) & _ID_MASK or _ID_STEP
        span_id = self._last_id if context is None else context.span_id
        return ReadableSpan(
            name,
            context=SpanContext(own.trace_id, span_id, False, _SAMPLED, own.trace_state),
            parent=parent,
            resource=self._resource,
            attributes=attributes or {},
            links=[Link(link)] if link is not None else [],
            kind=SPAN_KINDS.get(name, SpanKind.INTERNAL),
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=start_ns,
            end_time=max(start_ns, end_ns),
            instrumentation_scope=_SCOPE,
        )
