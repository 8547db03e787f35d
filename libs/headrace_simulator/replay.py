"""Replays a trace once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from headrace_common.errors import ConfigError, HeadraceError
from headrace_planner.observation import PlannedRole
from headrace_planner.settings import WorkerProfile
from headrace_router.placement import Placement
from headrace_simulator.fleet import Autoscaler, Decide, Fleet, planner_decisions
from headrace_simulator.job import (
    ChangeRow,
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
    if decide is None and settings.scaling.scaling is Scaling.PLANNER:
        decide = planner_decisions(settings.scaling.planner, profile)
    outcomes: list[RequestOutcome] = []

    async def replay() -> SimulationResult:
        """Sends every request at its time, and waits for the last answer."""
        loop = asyncio.get_running_loop()
        router = SimulatedRouter(settings, profile, wrap)
        fleet = Fleet(settings, profile, router, max(one.prompt_tokens for one in trace))
        start_s = loop.time()
        scaler = None if decide is None else Autoscaler(settings.scaling, fleet, router, decide)
        # The loop ends it, and the workers with it.
        scaling = None if scaler is None else loop.create_task(scaler.run())

        async def serve(request: TraceRequest) -> None:
            job = router.new_job(request)
            try:
                await router.serve(job)
                outcome = job.outcome()
            except HeadraceError as error:
                outcome = job.failed(error.reason)
            outcomes.append(outcome)
            on_ended(outcome)
            if scaler is not None:
                scaler.request_ended(outcome)

        async with asyncio.TaskGroup() as group:
            for request in trace:
                await asyncio.sleep(start_s + request.arrival_s - loop.time())
                group.create_task(serve(request))
        if scaling is not None and scaling.done():
            scaling.result()
        changes = scaler.changes if scaler is not None else []
        return _result(settings, fleet, outcomes, changes, loop.time() - start_s)

    return run_virtually(replay)


def _result(
    settings: SimulationSettings,
    fleet: Fleet,
    outcomes: Sequence[RequestOutcome],
    changes: Sequence[ChangeRow],
    duration_s: float,
) -> SimulationResult:
    complete = [one for one in outcomes if not one.failure]
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
        prefill_worker_hours=fleet.worker_s(PlannedRole.PREFILL) / 3_600.0,
        decode_worker_hours=fleet.worker_s(PlannedRole.DECODE) / 3_600.0,
        both_worker_hours=fleet.worker_s(PlannedRole.BOTH) / 3_600.0,
        changes=changes,
        classes=classes_of(outcomes, ttft_s, itl_s, duration_s),
    )
