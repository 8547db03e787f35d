"""Starts and ends the records of requests, and exports the spans of some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial

from headrace_common.latency.breakdown import Breakdown
from headrace_common.latency.clocks import ClockPair, clocks_now
from headrace_common.logs import TRACE_NAMES
from headrace_common.rpc.trace_context import SERVED
from headrace_common.telemetry.setup import Telemetry
from headrace_frontend.request.response_stream import ResponseStream
from headrace_frontend.running.record import RequestRecord


@dataclass(eq=False)
class RequestTracer:
    """Has a record of each request, and exports spans of those that are sampled, slow or failed."""

    telemetry: Telemetry
    _: KW_ONLY
    slow_s: float = 0.0
    """A request is slow when its first token comes after this time, unless that is 0."""
    on_start: Callable[[RequestRecord], None] = lambda _: None
    on_answer: Callable[[RequestRecord, ResponseStream, Breakdown], None] = lambda _, __, ___: None
    """Called for each response that has started, when its request has ended."""
    on_end: Callable[[RequestRecord, bool], None] = lambda _, __: None
    """Called at last, with whether the request was slow or has failed."""

    @contextmanager
    def record(self, request_id: str) -> Iterator[RequestRecord]:
        """A record that lasts as long as the block, and is not stored. It gets the error that the block raises."""
        record = self.start(request_id, clocks_now(), stored=False)
        try:
            yield record
        except BaseException as error:
            self.end(record, error)
            raise
        self.end(record)

    def start(
        self, request_id: str, arrival: ClockPair, *, priority: str = "", stored: bool = True
    ) -> RequestRecord:
        """The record of a request that arrived then. Call `end` with it."""
        unix_ns, monotonic_ns, error_ns = arrival
        context, parent = self.telemetry.root_context()
        served = SERVED.get()
        fetch = served.fetch if served is not None else None
        record = RequestRecord(
            arrival=monotonic_ns // 1_000,
            arrival_ns=monotonic_ns,
            arrival_unix_ns=unix_ns,
            clock_error_ns=error_ns,
            request_id=request_id,
            context=context,
            parent=parent,
            served=served,
            fetch=fetch and (fetch[0].monotonic_ns // 1_000, fetch[1].monotonic_ns // 1_000),
            priority=priority,
            stored=stored,
        )
        TRACE_NAMES.add(request_id, context)
        self.on_start(record)
        return record

    def end(self, record: RequestRecord, error: BaseException | None = None) -> None:
        """The request has ended, by an error or with its answer. The rest follows its prefill worker's report."""
        record.ended(error)
        record.when_reported(partial(self._end, record))

    def _end(self, record: RequestRecord) -> None:
        response = record.response
        record.close()
        breakdown = record.break_down()
        if response is not None and response.first_token_ns:
            self.on_answer(record, response, breakdown)
        kept = 0 < self.slow_s < 1e-6 * breakdown.first.total_us or bool(record.error)
        self.on_end(record, kept)
        if self.telemetry.exports and (kept or record.sampled):
            self.telemetry.export(record.spans(self.telemetry.provider.resource))
