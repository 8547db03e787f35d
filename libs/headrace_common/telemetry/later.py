"""Spans of OpenTelemetry's SDK that are made after the work that they show.

A request's ids have to be known when it starts. Whether it gets spans is known at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)
from opentelemetry.util.types import AttributeValue

from headrace_common.telemetry.schema_tables import SPAN_KINDS

SCOPE = "headrace"
_SCOPE = InstrumentationScope(SCOPE)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class PendingSpan(NonRecordingSpan):
    """The ids and the attributes of a span that is made later. `parent` is None for a root."""

    def __init__(self, context: SpanContext, parent: SpanContext | None) -> None:
        super().__init__(context)
        self.parent = parent
        self.attributes: dict[str, AttributeValue] = {}

    def is_recording(self) -> bool:
        return True

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        self.attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        self.attributes.update(attributes)


def ended_span(
    name: str,
    context: SpanContext,
    parent: SpanContext | None,
    times_unix_ns: tuple[int, int],
    attributes: Mapping[str, AttributeValue],
    *,
    resource: Resource,
    error: str = "",
    links: Sequence[SpanContext] = (),
) -> ReadableSpan:
    """A span with its start and its end. Exporters accept it, whether or not its trace was sampled."""
    start_ns, end_ns = times_unix_ns
    return ReadableSpan(
        name,
        context=SpanContext(
            context.trace_id, context.span_id, False, _SAMPLED, context.trace_state
        ),
        parent=parent,
        resource=resource,
        attributes=attributes,
        links=[Link(one) for one in links],
        kind=SPAN_KINDS.get(name, SpanKind.INTERNAL),
        status=Status(StatusCode.ERROR, error) if error else Status(),
        start_time=start_ns,
        end_time=max(start_ns, end_ns),
        instrumentation_scope=_SCOPE,
    )
