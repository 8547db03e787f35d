"""Decisions of an oracle that knows the trace, in place of the planner's in a simulation."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from headrace_planner.goal_decision import Demand, Forecast, decide_by_goals
from headrace_planner.observation import Interval, WorkerCounts
from headrace_planner.planner import apply_reasons, within_budget
from headrace_planner.settings import WorkerProfile
from headrace_simulator.settings import ScalingSettings
from headrace_simulator.trace import TraceRequest


class OracleDecisions:
    """The planner's goals and budget with the requests that will arrive until the next decision is in force.

    Each role gets the most workers that any interval until then needs.
    """

    def __init__(
        self, scaling: ScalingSettings, profile: WorkerProfile, trace: Sequence[TraceRequest]
    ) -> None:
        self._scaling = scaling
        self._profile = profile
        self._trace = trace
        self._arrivals = [request.arrival_s for request in trace]

    def __call__(self, interval: Interval) -> WorkerCounts:
        now_s = interval.start_unix_s + interval.duration_s
        step_s = self._scaling.interval_s
        count = 1 + math.ceil(self._scaling.worker_start_s / step_s)
        floors = [self._needed(now_s + number * step_s, step_s) for number in range(count)]
        wanted = WorkerCounts(max(one.prefill for one in floors), max(one.decode for one in floors))
        return within_budget(self._scaling.planner.budget, wanted)[0]

    def _needed(self, start_s: float, duration_s: float) -> WorkerCounts:
        first = bisect_left(self._arrivals, start_s)
        end = bisect_left(self._arrivals, start_s + duration_s)
        requests = self._trace[first:end]
        if not requests:
            return WorkerCounts(0, 0)
        demand = Demand(
            _known(len(requests)),
            _known(sum(one.prompt_tokens for one in requests) / len(requests)),
            _known(sum(one.answer_tokens for one in requests) / len(requests)),
            duration_s,
            cached_share=0.0,
        )
        reasons = decide_by_goals(self._scaling.planner, self._profile, demand)
        return apply_reasons(WorkerCounts(0, 0), reasons)


def _known(value: float) -> Forecast:
    return Forecast(value, "known", 0.0)
