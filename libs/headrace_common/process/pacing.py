"""How often a stream's tokens go out: at once when they come slowly, gathered when they come fast."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Final

GAP_MIN_S: Final = 0.002
GAP_MAX_S: Final = 0.025
_WINDOW_S: Final = 0.05
_BUSY: Final = 0.85
_CALM: Final = 0.6
_STEP: Final = 1.5
_SCHEDULER = Path("/proc/thread-self/schedstat")


class LoopLoad:
    """The least time between two messages of any stream of one event loop, by how busy the loop is.

    A message costs far more than a token in it. A loop that is busy all the time gathers tokens for longer, so that its
    messages become fewer, until it is not; others gather for 2 ms. Used by the loop's own thread only.
    """

    def __init__(self) -> None:
        self.gap_s = GAP_MIN_S
        self._since_s = -math.inf
        self._busy_s = 0.0

    def note(self, now_s: float) -> None:
        """Looks at the load, if that was not done lately. `now_s` is by time.monotonic."""
        elapsed_s = now_s - self._since_s
        if elapsed_s < _WINDOW_S:
            return
        busy_s = _busy_seconds()
        share = (busy_s - self._busy_s) / elapsed_s
        self._since_s, self._busy_s = now_s, busy_s
        self.judge(share)

    def judge(self, share: float) -> None:
        """Takes over what share of the time the loop was busy."""
        if share > _BUSY:
            self.gap_s = min(GAP_MAX_S, self.gap_s * _STEP)
        elif share < _CALM:
            self.gap_s = max(GAP_MIN_S, self.gap_s / _STEP)


class FlushPace:
    """When the next message of one stream may go out. What comes after a longer pause than the gap goes at once."""

    def __init__(self, load: LoopLoad) -> None:
        self._load = load
        self._last_s = -math.inf

    def rest_s(self, now_s: float) -> float:
        """How long to gather before the next message; 0 or less is not at all."""
        self._load.note(now_s)
        return self._last_s + self._load.gap_s - now_s

    def flushed(self, now_s: float) -> None:
        """A message goes out."""
        self._last_s = now_s


def _busy_seconds() -> float:
    """Time that this thread ran or waited for a CPU; where that is not told, the time that it ran."""
    try:
        ran_ns, waited_ns, _ = _SCHEDULER.read_text().split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(ran_ns) + int(waited_ns)) / 1e9
