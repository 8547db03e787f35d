"""The planner's loop: samples the load, and decides at the end of each interval."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace_common.errors import HeadraceError
from headrace_common.logs import CauseLog
from headrace_planner.observation import Interval, LoadSample
from headrace_planner.settings import WorkerProfile
from headrace_planner_service.config import PlannerConfig
from headrace_planner_service.observer import Observer, Reading, Totals, request_statistics
from headrace_planner_service.steering import DecisionEntry, Steering

_LOG = logging.getLogger(__name__)
_FAULTS = CauseLog(_LOG)


@dataclass(slots=True)
class _Collected:
    """What was read within one interval."""

    start_unix_s: float
    started_s: float
    samples: list[LoadSample] = field(default_factory=list)
    profile: WorkerProfile | None = None
    fault: str = ""

    def add(self, reading: Reading) -> None:
        self.samples.append(reading.sample)
        self.profile = reading.profile

    def miss(self, fault: str) -> None:
        self.fault = fault


class PlanningLoop:
    """Runs until it is cancelled. `on_decision` and `on_miss` are for metrics and traces."""

    def __init__(
        self,
        config: PlannerConfig,
        observer: Observer,
        steering: Steering,
        on_decision: Callable[[DecisionEntry], None],
        on_miss: Callable[[], None],
    ) -> None:
        self._config = config
        self._observer = observer
        self._steering = steering
        self._on_decision = on_decision
        self._on_miss = on_miss
        self._sample_count = round(config.interval_s / config.sample_interval_s)
        # The sums at the end of the last interval, and the latest ones.
        self._before: Totals | None = None
        self._latest: Totals = {}
        self._last: LoadSample | None = None
        self._fault = ""

    @property
    def last_sample(self) -> LoadSample | None:
        """The last complete observation."""
        return self._last

    @property
    def fault(self) -> str:
        """Why the latest observation was not complete. Empty when it was."""
        return self._fault

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self.run_interval()

    async def run_interval(self) -> DecisionEntry:
        """Samples one interval and decides."""
        collected = _Collected(time.time(), time.monotonic())
        for number in range(1, self._sample_count + 1):
            due_s = collected.started_s + number * self._config.interval_s / self._sample_count
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await self._sample(collected)
        entry = self._decide(collected, time.monotonic() - collected.started_s)
        _LOG.info("decision %d: %s", entry.number, entry.text)
        self._on_decision(entry)
        return entry

    async def _sample(self, collected: _Collected) -> None:
        try:
            reading: Reading = await self._observer.read()
        except HeadraceError as error:
            self._fault = error.detail
            collected.miss(error.detail)
            self._on_miss()
            _FAULTS.warn(error.reason, "the load could not be observed: %s", error.detail)
            return
        self._fault = ""
        self._last = reading.sample
        self._latest = reading.totals
        if self._before is None:
            self._before = reading.totals
        collected.add(reading)

    def _decide(self, collected: _Collected, duration_s: float) -> DecisionEntry:
        if 2 * len(collected.samples) < self._sample_count or self._before is None:
            return self._steering.skip_interval(
                collected.start_unix_s, duration_s, f"Not decided: {collected.fault}."
            )
        requests = request_statistics(self._before, self._latest)
        self._before = self._latest
        interval = Interval(
            collected.start_unix_s,
            duration_s,
            tuple(collected.samples),
            requests,
            collected.profile,
        )
        return self._steering.end_interval(interval)
