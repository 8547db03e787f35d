"""Paces the messages of token streams: slow tokens are sent at once, fast ones are batched.

A message costs an idle router about 0.5 ms of CPU. So all idle workers together send at a bounded rate, however many
they are. Changes are sent at once, and a worker with requests sends every second. A worker has two streams: its status,
and the events of its prefix cache.
"""

from __future__ import annotations

import math
import os
import threading
import time
from functools import cache
from typing import Final

SHORTEST_S: Final = 1.0
"""The interval of a worker with requests, and of every worker of a small deployment."""
_LONGEST_S: Final = 60.0
_MESSAGES_PER_S: Final = 5.0
"""Of the streams of one kind."""


def heartbeat_interval_s(workers: int) -> float:
    """Seconds between two messages on a stream of an idle worker, one of `workers`."""
    return min(_LONGEST_S, max(SHORTEST_S, workers / _MESSAGES_PER_S))


def must_change(interval_s: float, wanted_s: float) -> bool:
    """Whether a stream with `interval_s` is to be replaced. Small differences are not worth a new stream."""
    return not 0.5 < interval_s / wanted_s < 2.0


GAP_MIN_S: Final = 0.002
GAP_MAX_S: Final = 0.04
# While a router's event loop is busy, what is sent on its links within this time shares a message.
JOIN_S: Final = 0.002
_WINDOW_S: Final = 0.05
# Requests that arrive wait for the messages of all streams, so the loop saves messages long before it is full.
_BUSY_SHARE_HIGH: Final = 0.15
_BUSY_SHARE_LOW: Final = 0.1
_GAP_FACTOR: Final = 1.5
# A message takes some 0.1 ms. Where messages are this small a share of the work, fewer of them would not help.
_MESSAGES_PER_S_HIGH: Final = 1_000.0
_MESSAGES_PER_S_LOW: Final = 100.0
_SCHEDULER: Final = "/proc/thread-self/schedstat"


class LoopLoad:
    """The minimum gap between two messages of a stream, adapted to the load of one event loop.

    A message costs much more than a token in it. While messages keep the loop busy, the gap grows from 2 ms up to
    40 ms, so that each message has more tokens. A loop that is busy with few messages has other work, such as refusing
    calls. Then the gap stays or shrinks. Used only by the loop's thread.
    """

    def __init__(self) -> None:
        self.gap_s = GAP_MIN_S
        self.next_update_s = -math.inf
        """When `update` measures next."""
        self._updated_s = -math.inf
        self._busy_s = 0.0
        self._messages = 0
        """Sent by all streams since the last measurement."""

    @property
    def busy(self) -> bool:
        """Whether messages have kept the loop busy lately."""
        return self.gap_s > GAP_MIN_S

    def message_sent(self, now_s: float) -> float:
        """A stream sends a message now, by time.monotonic. The least seconds from it to the next one of the stream.

        Measures the load, at most once in 50 ms.
        """
        self._messages += 1
        if now_s >= self.next_update_s:
            self.update(now_s)
        return self.gap_s

    def update(self, now_s: float) -> None:
        """Measures the load."""
        elapsed_s = now_s - self._updated_s
        self.next_update_s = now_s + _WINDOW_S
        busy_s = _busy_seconds()
        share = (busy_s - self._busy_s) / elapsed_s
        messages_per_s = self._messages / elapsed_s
        self._updated_s, self._busy_s, self._messages = now_s, busy_s, 0
        self.adapt(share, messages_per_s)

    def adapt(self, busy_share: float, messages_per_s: float) -> None:
        """Adapts the gap to the share of time in which the loop was busy, and to the messages of all streams."""
        if busy_share > _BUSY_SHARE_HIGH and messages_per_s > _MESSAGES_PER_S_HIGH:
            self.gap_s = min(GAP_MAX_S, self.gap_s * _GAP_FACTOR)
        elif busy_share < _BUSY_SHARE_LOW or messages_per_s < _MESSAGES_PER_S_LOW:
            self.gap_s = max(GAP_MIN_S, self.gap_s / _GAP_FACTOR)


@cache
def _statistics_of(thread_id: int) -> int:
    """The open file of this thread. To open it takes several times as long as to read it."""
    return os.open(_SCHEDULER, os.O_RDONLY | os.O_CLOEXEC)


def _busy_seconds() -> float:
    """Seconds that this thread ran or waited for a CPU. Without scheduler statistics, seconds that it ran."""
    try:
        file = _statistics_of(threading.get_native_id())
        ran_ns, waited_ns, _ = os.pread(file, 128, 0).split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(ran_ns) + int(waited_ns)) / 1e9
