"""Changes the numbers of simulated workers by decisions of the real planner, or of a function in its place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace_planner.observation import (
    ClassCounts,
    DecodeLoad,
    Interval,
    LoadSample,
    RequestStatistics,
    WorkerCounts,
)
from headrace_planner.planner import PlannerState, plan
from headrace_planner.profile import WorkerProfile
from headrace_planner.settings import PlannerSettings
from headrace_simulator.fleet import Fleet
from headrace_simulator.job import RequestOutcome
from headrace_simulator.router import SimulatedRouter
from headrace_simulator.settings import ScalingSettings

Decide = Callable[[Interval], WorkerCounts]
"""The numbers of workers that should run after an interval."""


@dataclass(frozen=True, slots=True)
class Change:
    """A decision that changed the numbers of workers. `time_s` is from the start of the trace."""

    time_s: float
    before: WorkerCounts
    after: WorkerCounts


class PlannerDecisions:
    """The decisions of the planner, with its state."""

    def __init__(self, settings: PlannerSettings, profile: WorkerProfile) -> None:
        self._settings = settings
        self._profile = profile
        self._state = PlannerState()

    def __call__(self, interval: Interval) -> WorkerCounts:
        decision, self._state = plan(self._settings, self._profile, interval, self._state)
        return decision.target


class Autoscaler:
    """Observes the workers, and decides after each interval. No decision is made while a worker starts."""

    def __init__(
        self, settings: ScalingSettings, fleet: Fleet, router: SimulatedRouter, decide: Decide
    ) -> None:
        self.changes: list[Change] = []
        self._settings = settings
        self._fleet = fleet
        self._router = router
        self._decide = decide
        self._ended: list[RequestOutcome] = []

    def request_ended(self, outcome: RequestOutcome) -> None:
        """A request has ended since the last decision."""
        if not outcome.failure:
            self._ended.append(outcome)

    async def run(self) -> None:
        """Decides until it is cancelled."""
        start_s = interval_start_s = asyncio.get_running_loop().time()
        samples: list[LoadSample] = []
        while True:
            await asyncio.sleep(self._settings.interval_s / self._settings.samples)
            samples.append(self._sample())
            if len(samples) < self._settings.samples:
                continue
            interval = Interval(
                interval_start_s - start_s,
                self._settings.interval_s,
                tuple(samples),
                _statistics(self._ended),
            )
            interval_start_s += self._settings.interval_s
            samples, self._ended = [], []
            self._apply(interval)

    def _apply(self, interval: Interval) -> None:
        target = self._decide(interval)
        before = self._fleet.serving
        if target == before or self._fleet.is_starting:
            return
        self._fleet.set_target(target)
        time_s = interval.start_unix_s + interval.duration_s
        self.changes.append(Change(time_s, before, target))

    def _sample(self) -> LoadSample:
        decode = self._fleet.decode.values()
        waiting = self._router.waiting_requests
        each, more = divmod(waiting, max(1, len(decode)))
        return LoadSample(
            len(self._fleet.prefill),
            self._router.queue.depth,
            tuple(
                DecodeLoad(worker.kv_usage, each + (number < more), worker.slot_usage)
                for number, worker in enumerate(decode)
            ),
            ClassCounts(**self._router.queue.depths()),
        )


def _statistics(ended: Sequence[RequestOutcome]) -> RequestStatistics | None:
    if not ended:
        return None
    count = len(ended)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / count

    prompt_tokens = sum(one.request.prompt_tokens for one in ended)
    return RequestStatistics(
        request_count=count,
        prompt_tokens=prompt_tokens / count,
        answer_tokens=mean([one.request.answer_tokens for one in ended]),
        ttft_s=mean([one.ttft_s for one in ended]),
        itl_s=mean([one.itl_s for one in ended]),
        duration_s=mean([one.e2e_s for one in ended]),
        cached_share=sum(one.cached_tokens for one in ended) / prompt_tokens,
    )
