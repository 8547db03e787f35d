"""How fast prompts leave the prefill queue, from those that have."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MEMORY_S = 30.0


@dataclass(frozen=True, slots=True)
class QueueEstimate:
    """The queue at one moment.

    `queued_tokens` are prompt tokens, `oldest_age_s` is how long the task that has waited longest has waited.
    `wait_s` is how long a task that came now would wait: 0 while a worker has room, infinite while the queue is full.
    """

    depth: int
    queued_tokens: int
    oldest_age_s: float
    wait_s: float


class ThroughputEstimator:
    """Tokens that a task on a worker gets done per second, recent tasks counting for more."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._duration_s = 0.0
        self._tasks = 0.0
        self._noted_s = 0.0

    def note(self, tokens: int, duration_s: float, now_s: float) -> None:
        """A task of `tokens` has ended well after `duration_s` on its worker."""
        kept = math.exp(-max(0.0, now_s - self._noted_s) / _MEMORY_S) if self._tasks else 0.0
        self._tokens = kept * self._tokens + tokens
        self._duration_s = kept * self._duration_s + duration_s
        self._tasks = kept * self._tasks + 1
        self._noted_s = now_s

    @property
    def task_duration_s(self) -> float:
        """Mean time of a task on a worker; 0 when none has ended yet."""
        return self._duration_s / self._tasks if self._tasks else 0.0

    def wait_s(self, queued_tokens: int, running_tasks: int) -> float:
        """How long until a new task behind `queued_tokens` gets the place of one of `running_tasks`.

        0 when no task has ended yet, or none runs.
        """
        if self._tokens <= 0 or not running_tasks:
            return 0.0
        mean_tokens = self._tokens / self._tasks
        tokens_per_s = running_tasks * self._tokens / max(1e-9, self._duration_s)
        return (queued_tokens + mean_tokens) / tokens_per_s
