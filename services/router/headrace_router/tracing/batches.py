"""Splits exports of spans into small batches, so that no export occupies the event loop for long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp_pb2

BATCH_SPANS: Final = 256
ATTRIBUTES_MAX: Final = 128
_SERVICE_PREFIX: Final = "headrace-"
_NAME_CHARACTERS_MAX: Final = 128


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """At most BATCH_SPANS spans of one process, or none. `worker_id` is empty for a router."""

    service: str
    worker_id: str
    spans: Sequence[otlp_pb2.Span]


def span_batches(export: ExportTraceServiceRequest) -> Iterator[SpanBatch]:
    """The spans of an export, in their order. A part without spans is a batch too, so that it takes no longer."""
    for part in export.resource_spans:
        service, worker_id = _names_of(part.resource)
        for scope in part.scope_spans or (otlp_pb2.ScopeSpans(),):
            for start in range(0, len(scope.spans) or 1, BATCH_SPANS):
                yield SpanBatch(service, worker_id, scope.spans[start : start + BATCH_SPANS])


def _names_of(resource: resource_pb2.Resource) -> tuple[str, str]:
    """The service and the worker id of a process."""
    attributes = attributes_as_text(resource.attributes)
    service = attributes.get("service.name", "")[:_NAME_CHARACTERS_MAX]
    service = service.removeprefix(_SERVICE_PREFIX)
    instance = attributes.get("service.instance.id", "")[:_NAME_CHARACTERS_MAX]
    return service, "" if service == "router" else instance


def attributes_as_text(pairs: Iterable[common_pb2.KeyValue]) -> dict[str, str]:
    """The first ATTRIBUTES_MAX attributes."""
    return {pair.key: _text(pair.value) for pair in islice(pairs, ATTRIBUTES_MAX)}


def _text(value: common_pb2.AnyValue) -> str:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return ", ".join(_text(item) for item in islice(value.array_value.values, ATTRIBUTES_MAX))
    if kind == "bool_value":
        return "true" if value.bool_value else "false"
    content: Any = getattr(value, kind) if kind else ""
    return f"{content:g}" if kind == "double_value" else str(content)
