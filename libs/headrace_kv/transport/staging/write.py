"""One staged write, which consists of several writes of the inner transport."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from headrace_common.errors import HeadraceError
from headrace_kv.transport.base import Strategy, WriteResult


class StagedWrite:
    """Counts parts; the future ends with the last of them. Any thread may call its methods.

    It starts with one part, which belongs to its maker.
    """

    def __init__(self, strategy: Strategy, transport: str) -> None:
        self.future: Future[WriteResult] = Future()
        self._lock = threading.Lock()
        self._strategy = strategy
        self._transport = transport
        self._entry_count = 0
        self._gather_ns = self._wait_ns = 0
        self._parts = 1
        self._error: HeadraceError | None = None

    @property
    def failed(self) -> bool:
        """Whether a part has failed, so that no other need start."""
        return self._error is not None

    def start_part(self) -> None:
        with self._lock:
            self._parts += 1

    def add_result(self, result: WriteResult) -> None:
        """Adds the entries of a write of the inner transport."""
        with self._lock:
            self._transport = result.transport
            self._entry_count += result.entry_count

    def add_times(self, *, gather_ns: int = 0, wait_ns: int = 0) -> None:
        """Adds the time of copies to staging memory, and of waits for slots."""
        with self._lock:
            self._gather_ns += gather_ns
            self._wait_ns += wait_ns

    def end_part(self, error: HeadraceError | None) -> None:
        """Ends one part. The first error fails the write."""
        with self._lock:
            self._error = self._error or error
            self._parts -= 1
            if self._parts:
                return
            error = self._error
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(
                WriteResult(
                    self._transport,
                    self._strategy,
                    self._entry_count,
                    self._gather_ns,
                    self._wait_ns,
                )
            )
