"""The clocks of this host at one moment, and how far another host's clock is from ours."""

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


class ClockDifference(NamedTuple):
    """How far another clock is ahead of one of ours, and a bound on the error of that."""

    ahead_ns: int
    error_ns: int


# Two clocks drift apart by at most this share: quartz has 100 ppm, and a clock that is being adjusted 500.
_DRIFT: Final = 0.0006


class ClockOffset:
    """Relates another clock to ours, which must never be set: use the monotonic clock.

    An exchange has four stamps: we send, the other side receives, it replies, and we receive. No message arrives
    before it is sent, which bounds the offset from both sides. The bounds of all exchanges are intersected, so the
    fastest message in either direction determines the error. They widen with time, as clocks drift. An exchange that
    contradicts the others shows that the other clock was set: it replaces them.
    """

    __slots__ = ("_at_ns", "_high_ns", "_low_ns", "known")

    def __init__(self) -> None:
        self.known = False
        """Whether there was an exchange."""
        # The other clock was ahead by at least the lower bound at that time of our clock.
        self._low_ns = self._high_ns = self._at_ns = 0

    @property
    def difference(self) -> ClockDifference:
        """How far the other clock is ahead of ours at the last exchange. 0 while it is unknown."""
        low_ns, high_ns = self._low_ns, self._high_ns
        return ClockDifference((low_ns + high_ns) // 2, (high_ns - low_ns + 1) // 2)

    def add_exchange(
        self, sent_ns: int, received_ns: int, replied_ns: int, answered_ns: int
    ) -> bool:
        """Adds an exchange. `sent_ns` and `answered_ns` are by our clock, the others by the other one.

        False for an exchange that is impossible, because the other clock was set meanwhile: it is ignored.
        """
        low_ns, high_ns = replied_ns - answered_ns, received_ns - sent_ns
        if low_ns > high_ns:
            return False
        if self.known:
            # What is older is wider by now.
            since_ns = int(_DRIFT * (answered_ns - self._at_ns))
            own_ns, stored_ns = max(0, -since_ns), max(0, since_ns)
            low = max(low_ns - own_ns, self._low_ns - stored_ns)
            high = min(high_ns + own_ns, self._high_ns + stored_ns)
            if low <= high:
                low_ns, high_ns = low, high
            elif since_ns < 0:
                return True
        self.known = True
        self._low_ns, self._high_ns = low_ns, high_ns
        self._at_ns = max(answered_ns, self._at_ns)
        return True
