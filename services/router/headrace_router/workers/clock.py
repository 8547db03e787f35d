"""A worker's wall clock as the router knows it: from the times that the worker's status messages carry.

A worker's clock may be hours from the router's. Nothing but the expiry of tickets depends on it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final

# A clock that is set back is known after as many messages. A worker with requests sends at least one a second.
_MESSAGES: Final = 8


class WorkerClock:
    """Relates a worker's wall clock to this process's monotonic clock: setting the router's clock has no effect.

    Each message shows that the worker's clock is at least as far ahead as the difference of two times: the sending, by
    the worker's clock, and the receipt, by ours. The greatest difference of the last messages is the estimate. So the
    estimate is never ahead of the worker's clock, and behind by the delay of the fastest message. The first message
    answers a request, so its delay is at most that round trip: see `error_ns`.
    """

    def __init__(self) -> None:
        self._differences_ns: deque[int] = deque(maxlen=_MESSAGES)
        self._greatest_ns: int | None = None

    @property
    def known(self) -> bool:
        """Whether the worker has sent its time."""
        return bool(self._differences_ns)

    @property
    def error_ns(self) -> int | None:
        """How far the estimate may be behind the worker's clock. None while no round trip bounds it."""
        if self._greatest_ns is None or not self.known:
            return None
        return max(0, self._greatest_ns - max(self._differences_ns))

    def answered(self, sent_unix_ns: int, *, request_ns: int | None, received_ns: int) -> None:
        """A message that answers a request of `request_ns`. Both times are by the monotonic clock.

        `request_ns` None means unknown. What was known before is forgotten: the worker's clock may have been set.
        """
        self._differences_ns.clear()
        self._greatest_ns = None if request_ns is None else sent_unix_ns - request_ns
        self._differences_ns.append(sent_unix_ns - received_ns)

    def received(self, sent_unix_ns: int, *, received_ns: int) -> float:
        """A further message. Returns by how many seconds it shows that the worker's clock was set forward, or 0."""
        difference_ns = sent_unix_ns - received_ns
        known_ns = self._greatest_ns
        if known_ns is None:
            known_ns = max(self._differences_ns, default=difference_ns)
        self._differences_ns.append(difference_ns)
        if self._greatest_ns is not None and difference_ns > self._greatest_ns:
            # The worker's clock was set forward, so the first round trip bounds nothing any more.
            self._greatest_ns = None
        return max(0.0, (difference_ns - known_ns) / 1e9)

    def unix_ns(self, now_ns: int | None = None) -> int:
        """The worker's wall clock now, by default now. Ours, while the worker's is unknown."""
        if not self.known:
            return time.time_ns()
        return max(self._differences_ns) + (time.monotonic_ns() if now_ns is None else now_ns)

    def offset_s(self) -> float:
        """How far the worker's clock is ahead of this process's; negative when it is behind."""
        return (self.unix_ns() - time.time_ns()) / 1e9
