"""Virtual time for code that blocks its thread: a wait makes the calls that are due within it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace, TracebackType

import pytest

from tests.model.virtual_time import VirtualHandle, VirtualTimers


class BlockingClock(VirtualTimers):
    """The clock of a test with one thread. Calls of `call_later` stand for other threads."""

    def install(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Replaces `time` and `threading` in modules. Objects that exist already keep their real waits."""
        clock = SimpleNamespace(
            monotonic=self.time,
            monotonic_ns=lambda: int(self.time() * 1e9),
            time_ns=lambda: int(self.time() * 1e9),
            sleep=lambda seconds: self.wait(lambda: False, seconds),
        )
        waits = SimpleNamespace(
            Condition=lambda: _Condition(self),
            Event=self.event,
            Lock=threading.Lock,
            Timer=lambda seconds, call, args=(): _Timer(self, seconds, lambda: call(*args)),
        )
        for module in modules:
            monkeypatch.setattr(module, "time", clock)
            if hasattr(module, "threading"):
                monkeypatch.setattr(module, "threading", waits)

    def event(self) -> threading.Event:
        """An event with virtual waits."""
        return _Event(self)

    def wait(self, is_over: Callable[[], bool], timeout_s: float | None) -> bool:
        """Makes calls in order of their time until `is_over` or the timeout."""
        end_s = self.now_s + (math.inf if timeout_s is None else timeout_s)
        while not is_over() and self.next_s() <= end_s:
            assert self.next_s() < math.inf, "the wait has no end"
            self.advance_to(self.next_s())
        if is_over():
            return True
        self.advance_to(end_s)
        return False


class _Event(threading.Event):
    def __init__(self, clock: BlockingClock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        return self._clock.wait(self.is_set, timeout)


class _Condition:
    def __init__(self, clock: BlockingClock) -> None:
        self._clock = clock
        self._notified = False

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return

    def wait(self, timeout: float | None = None) -> bool:
        self._notified = False
        return self._clock.wait(lambda: self._notified, timeout)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        return self._clock.wait(predicate, timeout)

    def notify_all(self) -> None:
        self._notified = True


class _Timer:
    def __init__(self, clock: BlockingClock, seconds: float, call: Callable[[], object]) -> None:
        self._clock, self._seconds, self._call = clock, seconds, call
        self._handle: VirtualHandle | None = None

    def start(self) -> None:
        self._handle = self._clock.call_later(self._seconds, self._call)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def join(self, timeout: float | None = None) -> None:
        return
