"""Stores the traces of the last requests that this router served."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from opentelemetry.proto.trace.v1 import trace_pb2 as otlp_pb2

from headrace.inference.v1 import trace_pb2
from headrace_common.errors import InvalidRequest, NotFound
from headrace_common.latency.clocks import ClockDifference
from headrace_common.limits import PAGE_SIZE_MAX
from headrace_router.tracing.record import (
    SPAN_ID_BYTES,
    SpanBatch,
    StoredSpan,
    TraceRecord,
    stored_bytes,
    trace_to_proto,
)
from headrace_router.tracing.request_record import RoutedRecord

PAGE_SIZE_DEFAULT: Final = 20
SPAN_BYTES_MAX: Final = 65_536

DROPPED_SPAN: Final = "span"
"""The span has more than SPAN_BYTES_MAX bytes, or no valid id."""
DROPPED_TRACE: Final = "trace"
"""The span's trace has as many spans or bytes as it may have."""
DROPPED_STORE: Final = "store"
"""The span's trace was removed, because all traces together had too many bytes."""


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """Bounds of a trace store: traces, bytes of one trace, and bytes of all traces.

    Further spans of a trace are dropped. The least recent traces are removed first.
    """

    traces: int
    trace_bytes: int = 4 * 1024 * 1024
    total_bytes: int = 64 * 1024 * 1024


class TraceStore:
    """Stores the traces of the last requests: a record of each request, and the spans that workers send.

    Thread-safe, as exporters have threads of their own. No method holds the lock for longer than one span or one page
    takes, because the event loop takes it too.
    """

    def __init__(
        self, limits: TraceLimits, on_dropped: Callable[[str, int], None] = lambda _, __: None
    ) -> None:
        """`on_dropped` is called with a DROPPED_ reason and a number of spans, in any thread."""
        self._limits = limits
        self._on_dropped = on_dropped
        self._lock = threading.Lock()
        self._records: OrderedDict[str, TraceRecord] = OrderedDict()
        # Each trace id is in one of these, the oldest first.
        self._ordinary: OrderedDict[str, None] = OrderedDict()
        self._kept: OrderedDict[str, None] = OrderedDict()
        self._trace_of_request: dict[str, str] = {}
        self._sequence = 0
        self.stored_bytes = 0
        """Bytes of all stored spans."""

    def start_trace(self, trace_id: str, request_id: str, start_unix_ns: int) -> None:
        """Starts to store the spans of a request's trace.

        Requests that share a client's trace share one record, with the id of the newest request.
        """
        with self._lock:
            self._sequence += 1
            record = self._records.pop(trace_id, None) or TraceRecord(trace_id)
            forgotten = record.start_request(self._sequence, request_id, start_unix_ns)
            self._records[trace_id] = record
            if trace_id not in self._kept:
                self._ordinary.pop(trace_id, None)
                self._ordinary[trace_id] = None
            self._trace_of_request[request_id] = trace_id
            if forgotten is not None:
                self._forget_name(forgotten, trace_id)
            while len(self._records) > self._limits.traces:
                self._remove_oldest()

    def add_batch(self, batch: SpanBatch) -> None:
        """Adds spans of workers. Drops spans of unknown traces."""
        dropped: dict[str, int] = {}
        service, worker_id = batch.service, batch.worker_id
        for span in batch.spans:
            trace_id = span.trace_id.hex()
            # Routers receive the spans of each other's requests, so most spans may be of unknown traces.
            if trace_id not in self._records:
                continue
            content = span.SerializeToString()
            size = len(content)
            if size > SPAN_BYTES_MAX or len(span.span_id) != SPAN_ID_BYTES:
                dropped[DROPPED_SPAN] = dropped.get(DROPPED_SPAN, 0) + 1
                continue
            stored: StoredSpan = (service, worker_id, content, stored_bytes(size))
            with self._lock:
                self._add(trace_id, span, stored, dropped)
        if dropped:
            self._report(dropped)

    def keep(self, trace_id: str) -> None:
        """Removes this trace after others, as long as at most half of all traces are kept so."""
        with self._lock:
            if trace_id not in self._ordinary:
                return
            del self._ordinary[trace_id]
            self._kept[trace_id] = None
            if len(self._kept) > self._limits.traces // 2:
                oldest, _ = self._kept.popitem(last=False)
                self._ordinary[oldest] = None
                self._ordinary.move_to_end(oldest, last=False)

    def add_clocks(self, trace_id: str, differences: Mapping[str, ClockDifference]) -> None:
        """Moves the spans of these workers, by worker id, to this router's clock. Ignored for unknown traces."""
        with self._lock:
            record = self._records.get(trace_id)
            if record is not None:
                record.add_clocks(differences)

    def end_request(self, request: RoutedRecord) -> None:
        """A request of `start_trace` has ended. Ignored for unknown traces."""
        dropped: dict[str, int] = {}
        with self._lock:
            record = self._records.get(request.trace_id)
            if record is None:
                return
            before = record.stored_bytes
            if not record.add_request(request, self._limits.trace_bytes):
                dropped[DROPPED_TRACE] = 1
            self.stored_bytes += record.stored_bytes - before
            self._shrink(dropped)
        self._report(dropped)

    def get(self, name: str) -> trace_pb2.Trace:
        """The trace with this trace id or request id. The newest for an empty name. Raises NotFound."""
        with self._lock:
            trace_id = name or next(reversed(self._records), "")
            record = self._records.get(trace_id) or self._records.get(
                self._trace_of_request.get(name, "")
            )
            found = None if record is None else (record.summary(), record.contents)
        if found is None:
            raise NotFound(
                f"no trace {name!r} is stored; only the last {self._limits.traces} are"
                if name
                else "no trace is stored yet",
                metadata={"id": name},
            )
        return trace_to_proto(*found)

    def list_page(self, page_size: int, page_token: str) -> tuple[Sequence[trace_pb2.Trace], str]:
        """One page of traces without spans, newest first, and the next page's token. Raises InvalidRequest."""
        if page_size > PAGE_SIZE_MAX:
            raise InvalidRequest({"page_size": f"must be at most {PAGE_SIZE_MAX}, not {page_size}"})
        if page_token and not (page_token.isascii() and page_token.isdecimal()):
            raise InvalidRequest({"page_token": "must be a next_page_token, unchanged"})
        size = page_size or PAGE_SIZE_DEFAULT
        with self._lock:
            older = (
                record
                for record in reversed(self._records.values())
                if not page_token or record.sequence < int(page_token)
            )
            page = [record.summary() for record in islice(older, size + 1)]
        chosen = page[:size]
        token = str(chosen[-1].sequence) if len(page) > size else ""
        return [trace_to_proto(summary) for summary in chosen], token

    def _add(
        self,
        trace_id: str,
        span: otlp_pb2.Span,
        stored: StoredSpan,
        dropped: dict[str, int],
    ) -> None:
        record = self._records.get(trace_id)
        if record is None:
            return
        before = record.stored_bytes
        if not record.add(span, stored, self._limits.trace_bytes):
            dropped[DROPPED_TRACE] = dropped.get(DROPPED_TRACE, 0) + 1
            return
        self.stored_bytes += record.stored_bytes - before
        self._shrink(dropped)

    def _shrink(self, dropped: dict[str, int]) -> None:
        """Removes traces until the rest is within the bound."""
        while self.stored_bytes > self._limits.total_bytes:
            removed = self._remove_oldest()
            dropped[DROPPED_STORE] = dropped.get(DROPPED_STORE, 0) + removed.span_count

    def _report(self, dropped: dict[str, int]) -> None:
        for reason, count in dropped.items():
            self._on_dropped(reason, count)

    def _remove_oldest(self) -> TraceRecord:
        trace_id, _ = (self._ordinary or self._kept).popitem(last=False)
        record = self._records.pop(trace_id)
        self.stored_bytes -= record.stored_bytes
        for name in record.names:
            self._forget_name(name, trace_id)
        return record

    def _forget_name(self, name: str, trace_id: str) -> None:
        # Another trace may have a request with the same id.
        if self._trace_of_request.get(name) == trace_id:
            del self._trace_of_request[name]
