"""The simulated workers: they start, serve, drain and leave, by decisions of the planner."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from headrace_kv.layout.layout import WorkerRef
from headrace_planner.observation import (
    ClassCounts,
    DecodeLoad,
    Interval,
    LoadSample,
    PlannedRole,
    RequestStatistics,
    WorkerCounts,
)
from headrace_planner.planner import PlannerState, plan
from headrace_planner.settings import PlannerSettings, WorkerProfile
from headrace_router.workers.table import Worker
from headrace_simulator.cost import CostModel
from headrace_simulator.job import RequestOutcome
from headrace_simulator.router import LAYOUT, MODEL, SimulatedRouter
from headrace_simulator.settings import ScalingSettings, SimulationSettings, Way
from headrace_simulator.trace import BLOCK_TOKENS
from headrace_simulator.workers import SimulatedDecodeWorker, SimulatedPrefillWorker, WorkerCache

_BOTH: Final = (PlannedRole.PREFILL, PlannedRole.DECODE)


class Fleet:
    """Owns all workers. A worker costs from the order of its start until it has drained."""

    def __init__(
        self, settings: SimulationSettings, cost: CostModel, router: SimulatedRouter
    ) -> None:
        self.prefill: dict[WorkerRef, SimulatedPrefillWorker] = {}
        self.decode: dict[WorkerRef, SimulatedDecodeWorker] = {}
        self._settings = settings
        self._cost = cost
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._starting: dict[PlannedRole, int] = dict.fromkeys(_BOTH, 0)
        self._draining: dict[WorkerRef, SimulatedPrefillWorker | SimulatedDecodeWorker] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._begun_s: dict[WorkerRef, tuple[PlannedRole, float]] = {}
        self._spent_s: dict[PlannedRole, float] = dict.fromkeys(_BOTH, 0.0)
        for role, count in zip(
            _BOTH, (settings.prefill_workers, settings.decode_workers), strict=True
        ):
            for _ in range(count):
                self._join(role, self._order(role))

    @property
    def serving(self) -> WorkerCounts:
        """Workers that take requests."""
        return WorkerCounts(len(self.prefill), len(self.decode))

    @property
    def is_starting(self) -> bool:
        """Whether workers start."""
        return any(self._starting.values())

    def set_target(self, target: WorkerCounts) -> None:
        """Starts or drains workers, so that these counts serve in the end. None may be starting."""
        for role in _BOTH:
            difference = target.of(role) - self.serving.of(role)
            for _ in range(max(0, difference)):
                self._start(role)
            for _ in range(max(0, -difference)):
                self._drain_one(role)

    def worker_s(self, role: PlannedRole) -> float:
        """Seconds of all workers of a role until now."""
        now_s = self._loop.time()
        alive_s = sum(now_s - begun_s for one, begun_s in self._begun_s.values() if one is role)
        return self._spent_s[role] + alive_s

    async def close(self) -> None:
        """Stops all workers."""
        for timer in self._timers:
            timer.cancel()
        draining = [
            one for one in self._draining.values() if isinstance(one, SimulatedPrefillWorker)
        ]
        await asyncio.gather(*(one.close() for one in (*self.prefill.values(), *draining)))

    def _order(self, role: PlannedRole) -> WorkerRef:
        number = next(self._numbers)
        ref = WorkerRef(f"{role}-{number:05}", f"i{number:05}")
        self._begun_s[ref] = (role, self._loop.time())
        return ref

    def _start(self, role: PlannedRole) -> None:
        ref = self._order(role)
        self._starting[role] += 1

        def joined() -> None:
            self._timers.discard(timer)
            self._starting[role] -= 1
            self._join(role, ref)

        timer = self._loop.call_later(self._settings.scaling.worker_start_s, joined)
        self._timers.add(timer)

    def _join(self, role: PlannedRole, ref: WorkerRef) -> None:
        self._router.index.add_worker(ref)
        blocks = self._cost.kv_tokens // BLOCK_TOKENS
        tiers = self._settings.way is Way.KV_AWARE_TIERS
        host_blocks = self._settings.host_tokens // BLOCK_TOKENS if tiers else 0
        cache = WorkerCache(ref, blocks, host_blocks, partial(self._router.index.apply, ref))
        if role is PlannedRole.PREFILL:
            worker = SimulatedPrefillWorker(
                ref, self._router.queue, cache, self._cost, self._router.jobs, self._prefill_gone
            )
            self.prefill[ref] = worker
            worker.start(MODEL, LAYOUT)
            return
        self.decode[ref] = SimulatedDecodeWorker(
            self._decode_member(ref), cache, self._cost, self._router.update_load, self._decode_gone
        )
        self._router.set_workers(self.decode.values())

    def _decode_member(self, ref: WorkerRef) -> Worker:
        return Worker(
            ref=ref,
            endpoint="",
            model=MODEL,
            max_model_len=self._settings.max_model_len,
            max_num_seqs=self._cost.max_num_seqs,
            layout=LAYOUT,
        )

    def _drain_one(self, role: PlannedRole) -> None:
        """Drains the worker of a role that will be the first to be idle: of decode the one with the fewest requests."""
        if role is PlannedRole.PREFILL:
            ref, worker = next(reversed(self.prefill.items()))
            self._draining[ref] = self.prefill.pop(ref)
            worker.drain()
            return
        ref = min(self.decode, key=lambda one: self.decode[one].request_count)
        decode = self._draining[ref] = self.decode.pop(ref)
        self._router.set_workers(self.decode.values())
        decode.drain()

    def _prefill_gone(self, worker: SimulatedPrefillWorker) -> None:
        self._gone(worker.ref)

    def _decode_gone(self, worker: SimulatedDecodeWorker) -> None:
        self._gone(worker.worker.ref)

    def _gone(self, ref: WorkerRef) -> None:
        del self._draining[ref]
        self._router.index.remove_worker(ref)
        role, begun_s = self._begun_s.pop(ref)
        self._spent_s[role] += self._loop.time() - begun_s


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
