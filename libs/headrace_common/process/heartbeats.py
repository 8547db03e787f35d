"""How often idle workers send to a router or planner. Pure.

A message costs an idle router about 0.5 ms of CPU. So all idle workers together send at a bounded rate, however many
they are. Changes are sent at once, and a worker with requests sends every second. A worker has two streams: its status,
and the events of its prefix cache.
"""

from __future__ import annotations

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
