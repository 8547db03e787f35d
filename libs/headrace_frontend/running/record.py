"""What is kept of a request that has ended, and the spans that are made from it.

Every request has a record. Only sampled, slow and failed requests get spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext
from opentelemetry.util.types import AttributeValue

from headrace_common.latency.breakdown import Breakdown
from headrace_common.latency.steps import RequestSteps
from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import (
    breakdown_attributes,
    gen_ai_attributes,
    sum_attributes,
)
from headrace_common.telemetry.later import PendingSpan, ended_span

_ID_STEP: Final = 0x9E37_79B9_7F4A_7C15
_ID_MASK: Final = 0xFFFF_FFFF_FFFF_FFFF
NO_RESOURCE: Final = Resource({})


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has ended. Times in `tokens_unix_ns` are of the first, second and last token, 0 without it."""

    request_id: str
    root: PendingSpan
    times_unix_ns: tuple[int, int]
    arrival_ns: int
    steps: RequestSteps
    breakdown: Breakdown
    tokens_unix_ns: tuple[int, int, int]
    error: str = ""

    @property
    def trace_id(self) -> str:
        """As 32 hex characters."""
        return f"{self.root.get_span_context().trace_id:032x}"

    @property
    def sampled(self) -> bool:
        """Whether the workers send spans too."""
        return self.root.get_span_context().trace_flags.sampled

    def spans(self, resource: Resource = NO_RESOURCE) -> list[ReadableSpan]:
        """The spans of this process, the root first."""
        return list(SpanMaker(self, resource).spans())


class SpanMaker:
    """Makes spans of a record. Each call with the same arguments gives them the same ids."""

    def __init__(self, record: RequestRecord, resource: Resource, worker: int = 0) -> None:
        self._resource = resource
        self._root = record.root.get_span_context()
        self._ended = record
        self._unix_ns = record.times_unix_ns[0] - record.arrival_ns
        self._last_id = self._root.span_id + (worker << 32)

    def spans(self) -> Iterator[ReadableSpan]:
        """The root, the tokenizer and the tokens."""
        record = self._ended
        yield ended_span(
            name=schema.SPAN_REQUEST,
            context=self._root,
            parent=record.root.parent,
            times_unix_ns=record.times_unix_ns,
            attributes=self._root_attributes(),
            resource=self._resource,
            error=record.error,
        )
        for start, end in record.steps.tokenize:
            yield self._span(schema.SPAN_TOKENIZE, self._root, start, end)
        yield from self._token_spans()

    def _root_attributes(self) -> dict[str, AttributeValue]:
        record = self._ended
        attributes = {**record.root.attributes, **breakdown_attributes(record.breakdown)}
        if record.tokens_unix_ns[0]:
            start_ns, end_ns = record.times_unix_ns
            attributes.update(gen_ai_attributes(record.breakdown, end_ns - start_ns))
        return attributes

    def _token_spans(self) -> Iterator[ReadableSpan]:
        record = self._ended
        first_ns, second_ns, last_ns = record.tokens_unix_ns
        if not first_ns:
            return
        arrival_ns = record.times_unix_ns[0]
        yield self._at(schema.SPAN_FIRST_TOKEN, self._root, (arrival_ns, first_ns))
        yield self._at(schema.SPAN_STREAM, self._root, (first_ns, last_ns))
        second = record.breakdown.second
        if second is not None:
            times = (first_ns, second_ns)
            yield self._at(schema.SPAN_SECOND_TOKEN, self._root, times, sum_attributes(second))

    def _unix_of(self, time_us: int) -> int:
        return 1_000 * time_us + self._unix_ns

    def _span(
        self,
        name: str,
        parent: SpanContext,
        start_us: int,
        end_us: int,
        attributes: Mapping[str, AttributeValue] | None = None,
        error: str = "",
    ) -> ReadableSpan:
        times = (self._unix_of(start_us), self._unix_of(end_us))
        return self._at(name, parent, times, attributes, error)

    def _at(
        self,
        name: str,
        parent: SpanContext,
        times_unix_ns: tuple[int, int],
        attributes: Mapping[str, AttributeValue] | None = None,
        error: str = "",
    ) -> ReadableSpan:
        self._last_id = (self._last_id + _ID_STEP) & _ID_MASK or _ID_STEP
        context = SpanContext(self._root.trace_id, self._last_id, False)
        return ended_span(
            name=name,
            context=context,
            parent=parent,
            times_unix_ns=times_unix_ns,
            attributes=attributes or {},
            resource=self._resource,
            error=error,
        )
