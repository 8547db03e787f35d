"""Stores the traces of the last requests that this router served."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.inference.v1 import trace_pb2
from headrace_common.errors import InvalidRequest, NotFound
from headrace_common.limits import PAGE_SIZE_MAX
from headrace_common.trace_view.reading import whole_number
from headrace_frontend.answers import possible_ids
from headrace_frontend.running.record import RequestRecord
from headrace_router.tracing.comparison import compare
from headrace_router.tracing.record import (
    SPAN_ID_BYTES,
    SpanBatch,
    StoredSpan,
    TraceRecord,
    stored_bytes,
)

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
        self, limits: TraceLimits, on_dropped: Callable[[int, str], None] = lambda _, __: None
    ) -> None:
        """`on_dropped` is called with a number of spans and a DROPPED_ reason, in any thread."""
        self._limits = limits
        self._on_dropped = on_dropped
        self._lock = threading.Lock()
        # Each trace is in one of these by its id, the oldest first.
        self._ordinary: OrderedDict[str, TraceRecord] = OrderedDict()
        self._kept: OrderedDict[str, TraceRecord] = OrderedDict()
        self._sequence = 0
        self.stored_bytes = 0
        """Bytes of all stored requests and spans."""

    def start_trace(self, trace_id: str, request_id: str, start_unix_ns: int) -> None:
        """Starts to store the spans of a request's trace.

        Requests that share a client's trace share one record, with the id of the newest request.
        """
        with self._lock:
            self._sequence += 1
            record = self._kept.get(trace_id)
            if record is None:
                record = self._ordinary.setdefault(trace_id, TraceRecord())
                self._ordinary.move_to_end(trace_id)
            record.start_request(self._sequence, request_id, start_unix_ns)
            while len(self._ordinary) + len(self._kept) > self._limits.traces:
                self._remove_oldest()

    def add_batch(self, batch: SpanBatch) -> None:
        """Adds spans of workers. Drops spans of unknown traces."""
        dropped: dict[str, int] = {}
        service, worker_id = batch.service, batch.worker_id
        for span in batch.spans:
            trace_id = span.trace_id.hex()
            # Routers receive the spans of each other's requests, so most spans may be of unknown traces.
            if self._find(trace_id) is None:
                continue
            content = span.SerializeToString()
            size = len(content)
            if size > SPAN_BYTES_MAX or len(span.span_id) != SPAN_ID_BYTES:
                dropped[DROPPED_SPAN] = dropped.get(DROPPED_SPAN, 0) + 1
                continue
            stored: StoredSpan = (service, worker_id, content, stored_bytes(size))
            with self._lock:
                record = self._find(trace_id)
                if record is not None:
                    added = record.add(span, stored, self._limits.trace_bytes)
                    self._count(added, dropped)
        self._report(dropped)

    def keep(self, trace_id: str) -> None:
        """Removes this trace after others, as long as at most half of all traces are kept so."""
        with self._lock:
            record = self._ordinary.get(trace_id)
            if record is None:
                return
            # Threads search without the lock.
            self._kept[trace_id] = record
            del self._ordinary[trace_id]
            if len(self._kept) > self._limits.traces // 2:
                oldest = next(iter(self._kept))
                self._ordinary[oldest] = self._kept[oldest]
                self._ordinary.move_to_end(oldest, last=False)
                del self._kept[oldest]

    def end_request(self, request: RequestRecord) -> None:
        """A request of `start_trace` has ended. Ignored for unknown traces."""
        dropped: dict[str, int] = {}
        with self._lock:
            record = self._find(request.trace_id)
            if record is not None:
                self._count(record.add_request(request, self._limits.trace_bytes), dropped)
        if dropped:
            self._report(dropped)

    def get(self, name: str) -> trace_pb2.Trace:
        """The trace with this id of a trace, a request or a response. The newest for an empty name. Raises NotFound."""
        with self._lock:
            stored = self._newest_first()
            named = [
                *(one for one in stored if name in ("", one[0])),
                *(one for known in possible_ids(name) for one in stored if known in one[1].names),
            ]
            if not named:
                raise NotFound(
                    f"no trace {name!r} is stored; only the last {self._limits.traces} are"
                    if name
                    else "no trace is stored yet",
                    metadata={"id": name},
                )
            trace_id, record = named[0]
            trace, contents = record.summary(trace_id), record.contents()
            others = [request for _, one in stored for request in reversed(one.requests)]
        trace.spans.extend(contents.spans())
        if contents.requests:
            first = min(contents.requests, key=lambda request: request.arrival_ns)
            compare(trace, first, others)
        return trace

    def list_page(self, page_size: int, page_token: str) -> tuple[Sequence[trace_pb2.Trace], str]:
        """One page of traces without spans, newest first, and the next page's token. Raises InvalidRequest."""
        if page_size > PAGE_SIZE_MAX:
            raise InvalidRequest({"page_size": f"must be at most {PAGE_SIZE_MAX}, not {page_size}"})
        if page_token and whole_number(page_token) is None:
            raise InvalidRequest({"page_token": "must be a next_page_token, unchanged"})
        size = page_size or PAGE_SIZE_DEFAULT
        with self._lock:
            older = [
                (trace_id, record)
                for trace_id, record in self._newest_first()
                if not page_token or record.sequence < int(page_token)
            ]
            page = [record.summary(trace_id) for trace_id, record in older[:size]]
        token = str(older[size - 1][1].sequence) if len(older) > size else ""
        return page, token

    def _find(self, trace_id: str) -> TraceRecord | None:
        return self._ordinary.get(trace_id) or self._kept.get(trace_id)

    def _newest_first(self) -> list[tuple[str, TraceRecord]]:
        stored = [*self._ordinary.items(), *self._kept.items()]
        return sorted(stored, key=lambda one: -one[1].sequence)

    def _count(self, added_bytes: int | None, dropped: dict[str, int]) -> None:
        """Counts bytes that a trace has got in addition. None: it has no room for more."""
        if added_bytes is None:
            dropped[DROPPED_TRACE] = dropped.get(DROPPED_TRACE, 0) + 1
            return
        self.stored_bytes += added_bytes
        while self.stored_bytes > self._limits.total_bytes:
            removed = self._remove_oldest()
            dropped[DROPPED_STORE] = dropped.get(DROPPED_STORE, 0) + removed.span_count

    def _report(self, dropped: dict[str, int]) -> None:
        for reason, count in dropped.items():
            self._on_dropped(count, reason)

    def _remove_oldest(self) -> TraceRecord:
        _, record = (self._ordinary or self._kept).popitem(last=False)
        self.stored_bytes -= record.stored_bytes
        return record
