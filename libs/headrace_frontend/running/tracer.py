"""The root of a request's trace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Span, SpanContext
from opentelemetry.util.types import AttributeValue

from headrace_common.errors import HeadraceError
from headrace_common.latency.breakdown import Breakdown, break_down
from headrace_common.latency.clocks import ClockDifference
from headrace_common.latency.steps import RequestSteps
from headrace_common.logs import TRACE_NAMES
from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import (
    breakdown_attributes,
    gen_ai_attributes,
    server_attributes,
    sum_attributes,
)
from headrace_common.telemetry.later import PendingSpan, ended_span
from headrace_common.telemetry.setup import Telemetry
from headrace_frontend.request.response_stream import ResponseStream
from headrace_frontend.running.timeline import RequestTimeline, now_us

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
    error: str
    attempts: tuple[Any, ...]
    """What the spans of each attempt show beside its steps."""
    differences: Mapping[str, ClockDifference]
    """How far workers' clocks are ahead of this process's, by worker id."""

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


_GIVEN_UP: Final = "the client gave the request up"


@dataclass(eq=False)
class RequestTracer:
    """Makes spans of requests that are sampled, slow or failed."""

    record_type = RequestRecord

    telemetry: Telemetry
    _: KW_ONLY
    slow_s: float = 0.0
    """A request is slow when its first token comes after this time, unless that is 0."""
    on_latency: Callable[[ResponseStream, Breakdown], None] = lambda _, __: None
    """Called for each response that has started."""

    @contextmanager
    def request_span(
        self, request_id: str, timeline: RequestTimeline, *, stored: bool = True
    ) -> Iterator[PendingSpan]:
        """The root of the trace, over the block. It gets the error that the block raises, and the parts of the latency.

        `stored`: whether the trace is stored, where traces are. Spans are made after the block, when the prefill worker
        has reported.
        """
        root = self.telemetry.pending_span(schema.SPAN_REQUEST)
        root.set_attribute(schema.ATTRIBUTE_REQUEST_ID, request_id)
        root.set_attributes(server_attributes())
        TRACE_NAMES.add(request_id, root.get_span_context())
        if stored:
            self._start_stored(trace_id_of(root), request_id, timeline)
        error = ""
        try:
            yield root
        except HeadraceError as failure:
            root.set_attribute(schema.ATTRIBUTE_ERROR_REASON, failure.reason)
            error = failure.detail
            raise
        except asyncio.CancelledError:
            error = _GIVEN_UP
            raise
        finally:
            end_unix_ns = time.time_ns()
            timeline.when_reported(
                lambda: self._end(request_id, root, timeline, end_unix_ns, error, stored=stored)
            )

    def _end(
        self,
        request_id: str,
        root: PendingSpan,
        timeline: RequestTimeline,
        end_unix_ns: int,
        error: str,
        *,
        stored: bool,
    ) -> None:
        steps, response = timeline.steps(), timeline.response
        breakdown = break_down(steps, now_us())
        tokens_unix_ns = (0, 0, 0)
        if response is not None and response.started:
            self.on_latency(response, breakdown)
            tokens_unix_ns = (
                response.times.first_token_unix_ns,
                response.times.second_token_unix_ns,
                response.times.last_token_unix_ns,
            )
        differences: dict[str, ClockDifference] = {}
        for attempt in timeline.attempts:
            differences |= attempt.differences
        record = self.record_type(
            request_id,
            root,
            (timeline.arrival_unix_ns, end_unix_ns),
            timeline.arrival_ns,
            steps,
            breakdown,
            tokens_unix_ns,
            error,
            tuple(attempt.facts for attempt in timeline.attempts),
            differences,
        )
        kept = 0 < self.slow_s < 1e-6 * breakdown.first.total_us or bool(error)
        self._complete(record, stored=stored, kept=kept)
        if (kept or record.sampled) and self.telemetry.exports:
            self.telemetry.export(record.spans(self.telemetry.provider.resource))

    def _start_stored(self, trace_id: str, request_id: str, timeline: RequestTimeline) -> None:
        """A request starts that is to be stored."""

    def _complete(self, record: RequestRecord, *, stored: bool, kept: bool) -> None:
        """A request has ended. `stored`: as of `request_span`. `kept`: whether it was slow or has failed."""


def trace_id_of(span: Span) -> str:
    """The trace id of a span, as 32 hex characters."""
    return trace.format_trace_id(span.get_span_context().trace_id)
