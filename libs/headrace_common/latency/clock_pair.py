"""The wall clock and the monotonic clock at one moment."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

_READINGS_MAX: Final = 5
_GAP_NS_MAX: Final = 20_000
"""Two looks at the monotonic clock take less than a microsecond, unless the thread is interrupted between them."""


class ClockPair(NamedTuple):
    """Nanoseconds of both clocks at one moment, by `time.time_ns` and `time.monotonic_ns`."""

    unix_ns: int
    monotonic_ns: int
    error_ns: int
    """Bound on the distance of the two looks."""


def clocks_now() -> ClockPair:
    """Reads both clocks. A pause of this thread between the looks is seen, and the clocks are read again.

    Without that, everything that continues one clock by the other would be wrong by the pause.
    """
    best = _read()
    for _ in range(_READINGS_MAX - 1):
        if 2 * best.error_ns <= _GAP_NS_MAX:
            break
        best = min(best, _read(), key=lambda pair: pair.error_ns)
    return best


def _read() -> ClockPair:
    before_ns = time.monotonic_ns()
    unix_ns = time.time_ns()
    after_ns = time.monotonic_ns()
    return ClockPair(unix_ns, (before_ns + after_ns) // 2, (after_ns - before_ns + 1) // 2)
