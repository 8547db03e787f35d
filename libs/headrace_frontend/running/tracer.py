"""The root of a request's trace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Generic

from opentelemetry import trace
from opentelemetry.trace import Span

from headrace_common.errors import HeadraceError
from headrace_common.latency.breakdown import Breakdown, break_down
from headrace_common.logs import TRACE_NAMES
from headrace_common.telemetry import schema
from headrace_common.telemetry.latency import server_attributes
from headrace_common.telemetry.later import PendingSpan
from headrace_common.telemetry.setup import Telemetry
from headrace_frontend.request.response_stream import ResponseStream
from headrace_frontend.running.record import RequestRecord
from headrace_frontend.running.timeline import AttemptT, RequestTimeline, now_us

_GIVEN_UP: Final = "the client gave the request up"


class RequestTracer(Generic[AttemptT]):
    """Makes spans of requests that are sampled, slow or failed."""

    def __init__(
        self,
        telemetry: Telemetry,
        *,
        slow_s: float = 0.0,
        on_latency: Callable[[ResponseStream, Breakdown], None] = lambda _, __: None,
    ) -> None:
        """A request is slow when its first token comes after `slow_s`, unless that is 0.

        `on_latency` is called for each response that has started.
        """
        self._slow_s = slow_s
        self._on_latency = on_latency
        self._telemetry = telemetry

    @contextmanager
    def request_span(
        self, request_id: str, timeline: RequestTimeline[AttemptT], *, stored: bool = True
    ) -> Iterator[PendingSpan]:
        """The root of the trace, over the block. It gets the error that the block raises, and the parts of the latency.

        `stored`: whether the trace is stored, where traces are. Spans are made after the block, when the prefill worker
        has reported.
        """
        root = self._telemetry.pending_span(schema.SPAN_REQUEST)
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
        timeline: RequestTimeline[AttemptT],
        end_unix_ns: int,
        error: str,
        *,
        stored: bool,
    ) -> None:
        steps, response = timeline.steps(), timeline.response
        breakdown = break_down(steps, now_us())
        tokens_unix_ns = (0, 0, 0)
        if response is not None and response.started:
            self._on_latency(response, breakdown)
            tokens_unix_ns = (
                response.first_token_unix_ns,
                response.second_token_unix_ns,
                response.last_token_unix_ns,
            )
        ended = RequestRecord(
            request_id,
            root,
            (timeline.arrival_unix_ns, end_unix_ns),
            timeline.arrival_ns,
            steps,
            breakdown,
            tokens_unix_ns,
            error,
        )
        kept = 0 < self._slow_s < 1e-6 * breakdown.first.total_us or bool(error)
        record = self._complete(ended, timeline, stored=stored, kept=kept)
        if (kept or record.sampled) and self._telemetry.exports:
            self._telemetry.export(record.spans(self._telemetry.provider.resource))

    def _start_stored(
        self, trace_id: str, request_id: str, timeline: RequestTimeline[AttemptT]
    ) -> None:
        """A request starts that is to be stored."""

    def _complete(
        self,
        record: RequestRecord,
        timeline: RequestTimeline[AttemptT],
        *,
        stored: bool,
        kept: bool,
    ) -> RequestRecord:
        """The record of a request that has ended, with what this process has beside the steps.

        `stored`: as of `request_span`. `kept`: whether the request was slow or has failed.
        """
        return record


def trace_id_of(span: Span) -> str:
    """The trace id of a span, as 32 hex characters."""
    return trace.format_trace_id(span.get_span_context().trace_id)
