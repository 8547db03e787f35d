"""The simulated workers: they start, serve, drain and leave, by decisions of the planner."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from headrace_kv.layout import WorkerRef
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
from headrace_simulator.job import ChangeRow, RequestOutcome
from headrace_simulator.router import MODEL, SimulatedRouter
from headrace_simulator.settings import ScalingSettings, SimulationSettings, Way
from headrace_simulator.trace import BLOCK_TOKENS
from headrace_simulator.workers import SimulatedWorker, Surroundings, WorkerCache


class Fleet:
    """Owns all workers. A worker costs from the order of its start until it has drained."""

    def __init__(
        self,
        settings: SimulationSettings,
        profile: WorkerProfile,
        router: SimulatedRouter,
        prompt_tokens_max: int,
    ) -> None:
        """No prompt has more than `prompt_tokens_max` tokens."""
        self._workers: dict[PlannedRole, dict[WorkerRef, SimulatedWorker]] = {
            role: {} for role in PlannedRole
        }
        self._settings = settings
        self._profile = profile
        self._router = router
        self._around = Surroundings(
            profile,
            router.queue,
            router.jobs,
            settings.ttft_s if settings.have_targets else 0.0,
            settings.itl_s if settings.have_targets else 0.0,
            # Plain engines keep no room for prompts of others.
            1 if settings.way is Way.PLAIN else prompt_tokens_max,
            settings.way is not Way.PLAIN,
            router.update_load,
            self._gone,
        )
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._starting = 0
        self._draining: dict[WorkerRef, SimulatedWorker] = {}
        self._begun_s: dict[WorkerRef, tuple[PlannedRole, float]] = {}
        self._spent_s: dict[PlannedRole, float] = dict.fromkeys(PlannedRole, 0.0)
        for role in PlannedRole:
            for _ in range(settings.workers.of(role)):
                self._join(role, self._order(role))

    @property
    def serving(self) -> WorkerCounts:
        """Workers that take requests."""
        return WorkerCounts(*(len(self._workers[role]) for role in PlannedRole))

    @property
    def generating(self) -> Sequence[SimulatedWorker]:
        """Those that generate."""
        return [
            *self._workers[PlannedRole.DECODE].values(),
            *self._workers[PlannedRole.BOTH].values(),
        ]

    @property
    def is_starting(self) -> bool:
        """Whether workers start."""
        return self._starting > 0

    def set_target(self, target: WorkerCounts) -> None:
        """Starts or drains workers, so that these counts serve in the end. None may be starting."""
        for role in PlannedRole:
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

    def _order(self, role: PlannedRole) -> WorkerRef:
        number = next(self._numbers)
        ref = WorkerRef(f"{role}-{number:05}", f"i{number:05}")
        self._begun_s[ref] = (role, self._loop.time())
        return ref

    def _start(self, role: PlannedRole) -> None:
        ref = self._order(role)
        self._starting += 1

        def joined() -> None:
            self._starting -= 1
            self._join(role, ref)

        self._loop.call_later(self._settings.scaling.worker_start_s, joined)

    def _join(self, role: PlannedRole, ref: WorkerRef) -> None:
        self._router.index.add_worker(ref)
        blocks = self._profile.kv_tokens // BLOCK_TOKENS
        tiers = self._settings.way is Way.KV_AWARE_TIERS
        host_blocks = self._settings.host_tokens // BLOCK_TOKENS if tiers else 0
        cache = WorkerCache(ref, blocks, host_blocks, partial(self._router.index.apply, ref))
        member = Worker(
            ref=ref,
            endpoint="",
            model=MODEL,
            max_model_len=self._settings.max_model_len,
            max_num_seqs=self._profile.max_num_seqs,
            layout=self._router.layout,
            computes_prompts=role is PlannedRole.BOTH,
        )
        self._workers[role][ref] = SimulatedWorker(member, role, cache, self._around)
        self._update_router()

    def _update_router(self) -> None:
        draining = (one for one in self._draining.values() if one.role is not PlannedRole.PREFILL)
        self._router.set_workers([*self.generating, *draining])

    def _drain_one(self, role: PlannedRole) -> None:
        """Drains the worker of a role with the fewest requests, and of equals the last one."""
        workers = self._workers[role]
        ref = min(reversed(workers), key=lambda one: workers[one].request_count)
        worker = self._draining[ref] = workers.pop(ref)
        worker.drain()
        self._update_router()

    def _gone(self, worker: SimulatedWorker) -> None:
        ref = worker.worker.ref
        del self._draining[ref]
        self._router.index.remove_worker(ref)
        self._update_router()
        role, begun_s = self._begun_s.pop(ref)
        self._spent_s[role] += self._loop.time() - begun_s


Decide = Callable[[Interval], WorkerCounts]
"""The numbers of workers that should run after an interval."""


def planner_decisions(settings: PlannerSettings, profile: WorkerProfile) -> Decide:
    """The decisions of the planner, with its state."""
    state = PlannerState()

    def decide(interval: Interval) -> WorkerCounts:
        nonlocal state
        decision, state = plan(settings, replace(interval, profile=profile), state)
        return decision.target

    return decide


class Autoscaler:
    """Observes the workers, and decides after each interval. No decision is made while a worker starts."""

    def __init__(
        self, settings: ScalingSettings, fleet: Fleet, router: SimulatedRouter, decide: Decide
    ) -> None:
        self.changes: list[ChangeRow] = []
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
        if target == self._fleet.serving or self._fleet.is_starting:
            return
        self._fleet.set_target(target)
        time_s = interval.start_unix_s + interval.duration_s
        self.changes.append(ChangeRow(time_s, target.prefill, target.decode, target.both))

    def _sample(self) -> LoadSample:
        counts, generating = self._fleet.serving, self._fleet.generating
        each, more = divmod(self._router.waiting_requests, max(1, len(generating)))
        waiting_prompts = sum(one.waiting_prompts for one in generating if counts.both)
        return LoadSample(
            counts.prefill,
            self._router.queue.depth + waiting_prompts,
            tuple(
                DecodeLoad(worker.kv_usage, each + (number < more), worker.slot_usage)
                for number, worker in enumerate(generating)
            ),
            ClassCounts(**self._router.queue.depths()),
            both_workers=counts.both,
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
