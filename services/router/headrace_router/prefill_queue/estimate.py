"""Estimates of prefill throughput and waiting time, from the tasks that have completed. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_DECAY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class QueueEstimate:
    """The queue at one moment.

    `queued_tokens` counts prompt tokens, and `oldest_age_s` is the age of the oldest task. `wait_s` is how long a task
    that came now would wait: 0 while a worker has room, infinite while the queue is full.
    """

    depth: int
    queued_tokens: int
    oldest_age_s: float
    wait_s: float


class ThroughputEstimator:
    """Mean size and duration of completed tasks. Weights decay with the age of a task."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._duration_s = 0.0
        self._tasks = 0.0
        self._recorded_s = 0.0

    def record_task(self, tokens: int, duration_s: float, now_s: float) -> None:
        """A worker completed a task of `tokens` after `duration_s`."""
        kept = math.exp(-max(0.0, now_s - self._recorded_s) / _DECAY_S) if self._tasks else 0.0
        self._tokens = kept * self._tokens + tokens
        self._duration_s = kept * self._duration_s + duration_s
        self._tasks = kept * self._tasks + 1
        self._recorded_s = now_s

    @property
    def task_duration_s(self) -> float:
        """Mean duration of a task on a worker; 0 before the first task."""
        return self._duration_s / self._tasks if self._tasks else 0.0

    @property
    def task_tokens(self) -> float:
        """Mean tokens of a task; 0 before the first task."""
        return self._tokens / self._tasks if self._tasks else 0.0

    def wait_s(self, queued_tokens: float, running_tasks: int) -> float:
        """How long a new task behind `queued_tokens` waits for the place of one of `running_tasks`.

        0 before the first task has completed, or when none runs.
        """
        if self._tokens <= 0 or not running_tasks:
            return 0.0
        tokens_per_s = running_tasks * self._tokens / max(1e-9, self._duration_s)
        return (queued_tokens + self.task_tokens) / tokens_per_s


class ComputeEstimator:
    """Mean time of a computed token of a prompt. Weights decay with the age of a task."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._compute_s = 0.0
        self._recorded_s = 0.0

    def record_task(self, tokens: int, compute_s: float, now_s: float) -> None:
        """A worker computed `tokens` of a task, without those that it had cached, in `compute_s`."""
        if tokens <= 0 or compute_s <= 0:
            return
        kept = math.exp(-max(0.0, now_s - self._recorded_s) / _DECAY_S) if self._tokens else 0.0
        self._tokens = kept * self._tokens + tokens
        self._compute_s = kept * self._compute_s + compute_s
        self._recorded_s = now_s

    def sums(self, since_s: float = -math.inf) -> tuple[float, float]:
        """Tokens and seconds, both weighted; 0 before the first task, and without a task since `since_s`."""
        return (self._tokens, self._compute_s) if self._recorded_s >= since_s else (0.0, 0.0)
