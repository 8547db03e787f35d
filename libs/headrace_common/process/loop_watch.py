"""Finds an event loop that does not turn, with what it does instead."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_LOG = logging.getLogger(__name__)
_STUCK_S: Final = 5.0
_INTERVAL_S: Final = 0.5
_FRAMES: Final = 6


@contextmanager
def loop_watched(
    on_age: Callable[[float], None], *, stuck_s: float = _STUCK_S, interval_s: float = _INTERVAL_S
) -> Iterator[None]:
    """Over the block, a thread watches the running event loop.

    `on_age` gets the seconds for which the loop has been stuck, once that is longer than `stuck_s`, and 0 when it turns
    again. The log has the call in which it is stuck. `on_age` is called by the thread. Time in which the whole process
    stood still does not count.
    """
    watch = _LoopWatch(on_age, stuck_s, interval_s)
    thread = threading.Thread(target=watch.run, name="loop-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.close()


class _LoopWatch:
    def __init__(self, on_age: Callable[[float], None], stuck_s: float, interval_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._on_age = on_age
        self._stuck_s = stuck_s
        self._interval_s = interval_s
        self._closing = threading.Event()

    def close(self) -> None:
        """Ends the thread soon."""
        self._closing.set()

    def run(self) -> None:
        """Watches until `close`."""
        self._on_age(0.0)
        while not self._closing.wait(self._interval_s):
            age_s = self._wait_turn()
            if age_s > self._stuck_s:
                _LOG.warning("the event loop turns again, after %.1f s", age_s)
                self._on_age(0.0)

    def _wait_turn(self) -> float:
        """Returns when the loop has turned: for how many seconds it was stuck."""
        turned = threading.Event()
        try:
            self._loop.call_soon_threadsafe(turned.set)
        except RuntimeError:
            # The loop is closed.
            self._closing.set()
            return 0.0
        age_s, reported = 0.0, False
        while not self._closing.is_set():
            start_s, start_cpu_s = time.monotonic(), time.process_time()
            if turned.wait(self._interval_s):
                break
            cpu_s = time.process_time() - start_cpu_s
            age_s += min(time.monotonic() - start_s, max(cpu_s, 2 * self._interval_s))
            if age_s > self._stuck_s:
                self._on_age(age_s)
                if not reported:
                    _LOG.warning("the event loop is stuck for %.1f s in: %s", age_s, self._stack())
                reported = True
        return age_s

    def _stack(self) -> str:
        """The innermost calls of the loop's thread."""
        frame = sys._current_frames().get(self._thread_id)  # noqa: SLF001 - the documented way
        if frame is None:
            return "unknown"
        calls = traceback.extract_stack(frame)[-_FRAMES:]
        return " > ".join(f"{call.filename}:{call.lineno} {call.name}" for call in calls)
