"""A worker's wall clock as the router knows it: from the times that the worker's status messages carry."""

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
    estimate is never ahead of the worker's clock, and behind by the delay of the fastest message.
    """

    def __init__(self) -> None:
        self._differences_ns: deque[int] = deque(maxlen=_MESSAGES)

    @property
    def known(self) -> bool:
        """Whether the worker has sent its time."""
        return bool(self._differences_ns)

    def received(self, sent_unix_ns: int, *, received_ns: int) -> None:
        """A message arrived at `received_ns` of the monotonic clock."""
        self._differences_ns.append(sent_unix_ns - received_ns)

    def offset_s(self) -> float:
        """How far the worker's clock is ahead of this process's; negative when it is behind. 0 while it is unknown."""
        if not self.known:
            return 0.0
        return (max(self._differences_ns) + time.monotonic_ns() - time.time_ns()) / 1e9
