"""One write that is made of several, and how it has ended."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from headrace_common.errors import HeadraceError
from headrace_kv.transport.base import Strategy, WriteResult


class StagedWrite:
    """Counts the parts under way; the future ends with the last of them. Called from any thread.

    Whoever makes one is a part of it until it calls `end`.
    """

    def __init__(self, strategy: Strategy, transport: str) -> None:
        self.future: Future[WriteResult] = Future()
        self._lock = threading.Lock()
        self._strategy = strategy
        self._transport = transport
        self._entry_count = 0
        self._parts = 1
        self._error: HeadraceError | None = None

    @property
    def failed(self) -> bool:
        """Whether a part has failed, so that no other need be begun."""
        return self._error is not None

    def begin(self) -> None:
        """One more part is under way."""
        with self._lock:
            self._parts += 1

    def note(self, written: WriteResult) -> None:
        """What the transport below was given."""
        with self._lock:
            self._transport = written.transport
            self._entry_count += written.entry_count

    def end(self, error: HeadraceError | None) -> None:
        """A part has ended."""
        with self._lock:
            self._error = self._error or error
            self._parts -= 1
            if self._parts:
                return
            error = self._error
        if error is not None:
            self.future.set_exception(error)
        else:
            written = WriteResult(self._transport, self._strategy, self._entry_count)
            self.future.set_result(written)
