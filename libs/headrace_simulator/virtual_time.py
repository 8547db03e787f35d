"""An event loop in which time passes only while nothing can run.

While the loop runs, `time.monotonic` and its relatives return the virtual time. So code that measures or waits needs no
change. The loop reads no file and no socket, and no thread may wake it.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from headrace_common.errors import InternalError

_START_S: Final = 1_000.0
"""Not 0, because a time of 0 means "never" in some places."""
_T = TypeVar("_T")


class _VirtualSelector(selectors.BaseSelector):
    """Returns no events. Instead of a wait, it advances the time."""

    def __init__(self) -> None:
        self.now_s = _START_S
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, number, events, data)
        self._keys[number] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        return self._keys.pop(number)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise InternalError("the simulation cannot go on: every request waits for another")
        self.advance(timeout)
        return []

    def begin_at(self, seconds: float) -> None:
        """The time is this one."""
        self.now_s = seconds

    def advance(self, seconds: float) -> None:
        """Time passes, if `seconds` is more than 0."""
        self.now_s += max(0.0, seconds)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own."""

    def __init__(self) -> None:
        self._clock = _VirtualSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        """The virtual time in seconds."""
        return self._clock.now_s

    def begin_at(self, seconds: float) -> None:
        """The time is this one, before any timer is set."""
        self._clock.begin_at(seconds)

    def pass_over(self, seconds: float) -> None:
        """Time passes without a timer: those that are due by then are late."""
        self._clock.advance(seconds)

    def run_forever(self) -> None:
        with _installed(self):
            super().run_forever()


def run_virtually(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Runs a coroutine to its end in virtual time. Only one at a time may run in a process.

    Raises InternalError when no timer is left and the coroutine has not ended.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_awaited(work))


async def _awaited(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Calls `work` inside of the loop."""
    return await work()


@contextmanager
def _installed(loop: VirtualLoop) -> Iterator[None]:
    clocks: dict[str, Callable[[], float] | Callable[[], int]] = {
        "monotonic": loop.time,
        "monotonic_ns": lambda: int(loop.time() * 1e9),
        "time": loop.time,
        "time_ns": lambda: int(loop.time() * 1e9),
    }
    real = {name: getattr(time, name) for name in clocks}
    for name, clock in clocks.items():
        setattr(time, name, clock)
    try:
        yield
    finally:
        for name, clock in real.items():
            setattr(time, name, clock)
