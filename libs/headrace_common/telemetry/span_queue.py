"""Passes ended spans to an exporter in batches, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from headrace_common.telemetry.spans import EndedSpan, SpanSource

_LOG = logging.getLogger(__name__)

BATCH_SPANS: Final = 512
QUEUED_SPANS_MAX: Final = 8_192
_DELAY_S: Final = 0.2
_BUSY_DELAY_S: Final = 1.0
_QUICK_EXPORTS: Final = 4

Export: TypeAlias = Callable[[Sequence[tuple[SpanSource, EndedSpan]]], object]
"""Exports a batch. It may block for a bounded time."""


class SpanQueue:
    """Exports the spans of up to 200 ms together, at most 512 at once.

    After several exports in a row, the next ones have the spans of up to 1 s each. An export costs as much as the spans
    of several requests. Drops spans while 8,192 wait. The thread starts with the first span, and sleeps while there is
    none.
    """

    def __init__(self, export: Export, wanted: Callable[[], bool] = lambda: True) -> None:
        """Spans that end while `wanted` returns False are not queued."""
        self._export = export
        self._wanted = wanted
        self._spans: deque[tuple[SpanSource, EndedSpan]] = deque()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._exporting = threading.Lock()
        self._filled = threading.Event()
        self._full = threading.Event()
        self._closed = False
        self._dropping = False
        # Exports that may take place soon: one more for each second.
        self._quick = float(_QUICK_EXPORTS)
        self._counted_s = time.monotonic()

    def add(self, source: SpanSource, span: EndedSpan) -> None:
        """A SpanSink. Thread-safe."""
        if not self._wanted():
            return
        waiting = len(self._spans)
        if self._closed or waiting >= QUEUED_SPANS_MAX:
            self._note_dropped()
            return
        self._spans.append((source, span))
        if not self._filled.is_set():
            self._start()
            self._filled.set()
        if waiting >= BATCH_SPANS:
            self._full.set()

    def flush(self) -> None:
        """Exports every span that was added before. Blocks for as long as the exports of the batches take."""
        with self._exporting:
            for _ in range(QUEUED_SPANS_MAX // BATCH_SPANS + 1):
                if not self._export_batch():
                    return

    def close(self) -> None:
        """Exports the remaining spans and ends the thread. Blocks as `flush` does."""
        self._closed = True
        self._filled.set()
        self._full.set()
        self.flush()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            self._filled.wait()
            if not self._full.wait(_DELAY_S) and self._is_busy():
                self._full.wait(_BUSY_DELAY_S - _DELAY_S)
            # Before the export: spans that come during it set them again.
            self._full.clear()
            self._filled.clear()
            self._quick = max(-1.0, self._quick - 1.0)
            self.flush()

    def _is_busy(self) -> bool:
        now_s = time.monotonic()
        more = (now_s - self._counted_s) / _BUSY_DELAY_S
        self._quick, self._counted_s = min(_QUICK_EXPORTS, self._quick + more), now_s
        return self._quick < 1.0

    def _export_batch(self) -> bool:
        """Whether there was a span."""
        batch: list[tuple[SpanSource, EndedSpan]] = []
        while self._spans and len(batch) < BATCH_SPANS:
            batch.append(self._spans.popleft())
        if not batch:
            return False
        self._dropping = False
        try:
            self._export(batch)
        except Exception:  # noqa: BLE001 - an exporter's bug must not end the thread
            _LOG.exception("%d spans were not exported", len(batch))
        return True

    def _note_dropped(self) -> None:
        if not self._dropping and not self._closed:
            self._dropping = True
            _LOG.warning("spans are dropped, because %d wait for export", QUEUED_SPANS_MAX)
