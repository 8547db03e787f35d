"""Estimates of prefill throughput, waiting time and computing time, from what workers report. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from headrace_common.time_model.model import StepTimes, TimeModel, mean_steps
from headrace_kv.layout.layout import WorkerRef

_DECAY_S: Final = 30.0
_MEAN_AGE_S: Final = 0.5


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


class PrefillTimes:
    """What the prefill workers of one model have learned of their steps, as one worker with their mean times.

    The mean of hundreds of workers is computed again at an interval, and not for each placement.
    """

    def __init__(self) -> None:
        self._steps: dict[WorkerRef, StepTimes] = {}
        self._reported_s = -math.inf
        self._mean = TimeModel()
        self._mean_due_s = -math.inf

    def report(self, ref: WorkerRef, steps: StepTimes, now_s: float) -> None:
        """Replaces what a worker has learned."""
        self._reported_s = now_s
        if steps.knows_prompts:
            if not self._steps:
                self._mean_due_s = -math.inf
            self._steps[ref] = steps

    def remove(self, ref: WorkerRef) -> None:
        """Forgets a worker."""
        self._steps.pop(ref, None)

    def prefill_s(
        self, tokens: float, prior_tokens: float, now_s: float, age_max_s: float
    ) -> float:
        """How long a worker computes `tokens` of a prompt after `prior_tokens` of it.

        0 before a worker knows, and when the last report is older than `age_max_s`.
        """
        if now_s - self._reported_s > age_max_s:
            return 0.0
        if now_s >= self._mean_due_s:
            self._mean = TimeModel(mean_steps(self._steps.values()))
            self._mean_due_s = now_s + _MEAN_AGE_S
        return self._mean.step_s(tokens, prior_tokens=prior_tokens) or 0.0
