"""Replays a trace once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from headrace_common.errors import ConfigError, HeadraceError
from headrace_planner.observation import PlannedRole
from headrace_planner.settings import WorkerProfile
from headrace_router.placement import Placement
from headrace_simulator.fleet import Autoscaler, Decide, Fleet, PlannerDecisions
from headrace_simulator.job import (
    RequestOutcome,
    SimulationResult,
    attainment,
    classes_of,
    failures_of,
    itl_times,
    times_of,
)
from headrace_simulator.router import SimulatedRouter
from headrace_simulator.settings import Scaling, SimulationSettings
from headrace_simulator.trace import TraceRequest
from headrace_simulator.virtual_time import run_virtually


def simulate(
    settings: SimulationSettings,
    profile: WorkerProfile,
    trace: Sequence[TraceRequest],
    decide: Decide | None = None,
    *,
    wrap: Callable[[Placement], Placement] = lambda placement: placement,
    on_ended: Callable[[RequestOutcome], None] = lambda outcome: None,
) -> SimulationResult:
    """Replays the trace in virtual time. Equal arguments give equal results.

    `decide` changes the numbers of workers in place of `settings.scaling.scaling`. `wrap` makes the placement from that
    of the settings. `on_ended` gets each request that has ended.
    Raises ConfigError for a profile that lacks the size of a worker's KV memory.
    """
    if profile.kv_tokens < 1 or profile.max_num_seqs < 1:
        raise ConfigError(
            "a simulation needs kv_tokens and max_num_seqs in the profile: `headrace profile` writes them",
            metadata={"field": "profile"},
        )
    return run_virtually(lambda: _Replay(settings, profile, trace, decide, wrap, on_ended).run())


class _Replay:
    def __init__(
        self,
        settings: SimulationSettings,
        profile: WorkerProfile,
        trace: Sequence[TraceRequest],
        decide: Decide | None,
        wrap: Callable[[Placement], Placement],
        on_ended: Callable[[RequestOutcome], None],
    ) -> None:
        self._settings = settings
        self._trace = trace
        if decide is None and settings.scaling.scaling is Scaling.PLANNER:
            decide = PlannerDecisions(settings.scaling.planner, profile)
        self._decide = decide
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        self._router = SimulatedRouter(settings, profile, wrap)
        longest = max(request.prompt_tokens for request in trace)
        self._fleet = Fleet(settings, profile, self._router, longest)
        self._outcomes: list[RequestOutcome] = []
        self._autoscaler: Autoscaler | None = None

    async def run(self) -> SimulationResult:
        """Sends every request at its time, and waits for the last answer."""
        start_s = self._loop.time()
        if self._decide is not None:
            self._autoscaler = Autoscaler(
                self._settings.scaling, self._fleet, self._router, self._decide
            )
            self._scaling = self._loop.create_task(self._autoscaler.run())
        async with asyncio.TaskGroup() as group:
            for request in self._trace:
                await asyncio.sleep(start_s + request.arrival_s - self._loop.time())
                group.create_task(self._serve(request))
        # The loop ends the workers with it.
        return self._result(self._loop.time() - start_s)

    async def _serve(self, request: TraceRequest) -> None:
        job = self._router.new_job(request)
        try:
            await self._router.serve(job)
            outcome = job.outcome()
        except HeadraceError as error:
            outcome = job.failed(error.reason)
        self._outcomes.append(outcome)
        self._on_ended(outcome)
        if self._autoscaler is not None:
            self._autoscaler.request_ended(outcome)

    def _result(self, duration_s: float) -> SimulationResult:
        outcomes = self._outcomes
        complete = [one for one in outcomes if not one.failure]
        settings = self._settings
        ttft_s, itl_s = settings.ttft_s, settings.itl_s
        met = attainment(outcomes, ttft_s, itl_s)
        prompt_tokens = sum(one.request.prompt_tokens for one in complete)
        return SimulationResult(
            way=settings.way,
            scaling=settings.scaling.scaling,
            requests=len(outcomes),
            failures=failures_of(outcomes),
            duration_s=duration_s,
            ttft=times_of([one.ttft_s for one in complete]),
            itl=itl_times(complete),
            e2e=times_of([one.e2e_s for one in complete]),
            attainment=met,
            ttft_attainment=attainment(outcomes, ttft_s, math.inf),
            itl_attainment=attainment(outcomes, math.inf, itl_s),
            goodput=met * len(outcomes) / max(1e-9, duration_s),
            cached_share=sum(one.cached_tokens for one in complete) / max(1, prompt_tokens),
            prefill_worker_hours=self._fleet.worker_s(PlannedRole.PREFILL) / 3_600.0,
            decode_worker_hours=self._fleet.worker_s(PlannedRole.DECODE) / 3_600.0,
            both_worker_hours=self._fleet.worker_s(PlannedRole.BOTH) / 3_600.0,
            changes=self._autoscaler.changes if self._autoscaler is not None else [],
            classes=classes_of(outcomes, ttft_s, itl_s, duration_s),
        )
