"""The decision by goals: how many workers reach the goals of latency for the predicted requests. Pure.

A correction is observed latency over that of the profile. It shows what the profile of one worker does not contain,
such as interference.

    prefill = fewest workers with wait + time of service <= ttft goal, in the mean and for a share of the requests, see
              queueing.py

    decode = ceil((answers + z x sqrt(answers)) / answers of a worker with itl <= itl goal / itl correction)

    answers = requests x answer tokens / seconds x itl: those under way at the same time

Answers come at random, so their number varies by about its square root. z is the normal quantile of the share. For a
share of a half it is 0, and the formula is that of Dynamo's SLA planner, as both corrections are. Observed TTFT
contains the wait for a worker, so that only a factor below 1 corrects the time of service.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from headrace_planner.forecast import Forecast, forecast
from headrace_planner.observation import Interval, PlannedRole, Reason, RequestStatistics
from headrace_planner.profile import WorkerProfile
from headrace_planner.queueing import fewest_workers
from headrace_planner.settings import PlannerSettings


@dataclass(frozen=True, slots=True)
class Demand:
    """The predicted requests of the next interval."""

    requests: Forecast
    prompt_tokens: Forecast
    answer_tokens: Forecast
    duration_s: float
    cached_share: float

    @property
    def context_tokens(self) -> float:
        """Mean length of a request's context during its answer."""
        return self.prompt_tokens.value + self.answer_tokens.value / 2

    @property
    def new_prompt_tokens(self) -> float:
        """Prompt tokens of a request without those that a prefix cache has."""
        return self.prompt_tokens.value * (1.0 - self.cached_share)


@dataclass(frozen=True, slots=True)
class Corrections:
    """Observed latency over that of the profile. 1 means as in the profile."""

    ttft: float = 1.0
    itl: float = 1.0


def predict_demand(settings: PlannerSettings, history: Sequence[Interval]) -> Demand | None:
    """The requests of the next interval, or None when no request was observed.

    An interval without requests counts with 0 requests, and changes neither lengths nor the cached share.
    """
    seen = [interval.requests for interval in history if interval.requests is not None]
    if not seen:
        return None

    def predicted(values: Sequence[float], season_intervals: int) -> Forecast:
        return forecast(values, season_intervals, settings.backtest_share)

    counts = [float(i.requests.request_count) if i.requests else 0.0 for i in history]
    return Demand(
        requests=predicted(counts, settings.season_intervals),
        prompt_tokens=predicted([requests.prompt_tokens for requests in seen], 0),
        answer_tokens=predicted([requests.answer_tokens for requests in seen], 0),
        duration_s=history[-1].duration_s,
        cached_share=seen[-1].cached_share,
    )


def corrections(
    settings: PlannerSettings, profile: WorkerProfile, interval: Interval
) -> Corrections:
    """What the last interval shows beside the profile, within `correction_max` in both directions."""
    requests = interval.requests
    if requests is None or requests.request_count == 0:
        return Corrections()
    usages = [worker.kv_usage for sample in interval.samples for worker in sample.decode]
    usage = sum(usages) / len(usages) if usages else 0.0
    itl_s = profile.expected_itl_s(usage, requests.prompt_tokens + requests.answer_tokens / 2)
    ttft_s = profile.ttft_s(_new_tokens(requests))
    most = settings.correction_max
    return Corrections(
        _bounded(requests.ttft_s / ttft_s, most), _bounded(requests.itl_s / itl_s, most)
    )


def decide_by_goals(
    settings: PlannerSettings, profile: WorkerProfile, demand: Demand, correction: Corrections
) -> tuple[Reason, Reason]:
    """The fewest workers of each role for the demand, before floors and budget."""
    rate = demand.requests.value / demand.duration_s
    return (
        _prefill_rule(settings, profile, demand, rate, min(1.0, correction.ttft)),
        _decode_rule(settings, profile, demand, rate, correction.itl),
    )


def _prefill_rule(
    settings: PlannerSettings,
    profile: WorkerProfile,
    demand: Demand,
    rate: float,
    correction: float,
) -> Reason:
    length = max(1.0, demand.new_prompt_tokens)
    service_s = profile.ttft_s(length) * correction
    wait_max_s = settings.goals.ttft_s - service_s
    is_in_reach = wait_max_s > 0.0
    # Where no number of workers reaches the goal, the wait is bounded by the time of service.
    count = fewest_workers(
        rate,
        service_s,
        wait_max_s if is_in_reach else service_s,
        late_share_max=1.0 - settings.goals.share,
    )
    sentence = (
        f"{rate:.2f} requests per second ({demand.requests.predictor}) with {length:.0f} new prompt tokens take "
        f"{service_s * 1e3:.0f} ms each"
    )
    if is_in_reach:
        sentence += (
            f": {count} prefill workers keep the mean wait, and that of {settings.goals.share:.1%} of them, within "
            f"{wait_max_s * 1e3:.0f} ms."
        )
    else:
        sentence += f", more than the goal of {settings.goals.ttft_s * 1e3:.0f} ms: no number of workers reaches it."
    return Reason(
        PlannedRole.PREFILL,
        "time to first token",
        count,
        {
            "requests_per_s": rate,
            "prompt_tokens": length,
            "service_s": service_s,
            "correction": correction,
            "goal_s": settings.goals.ttft_s,
        },
        sentence,
    )


def _decode_rule(
    settings: PlannerSettings,
    profile: WorkerProfile,
    demand: Demand,
    rate: float,
    correction: float,
) -> Reason:
    goal_s = settings.goals.itl_s / correction
    point = profile.best_decode(goal_s, demand.context_tokens)
    tokens_per_s = rate * demand.answer_tokens.value
    answers = tokens_per_s * point.itl_s
    peak = answers + NormalDist().inv_cdf(settings.goals.share) * math.sqrt(answers)
    count = math.ceil(peak / (point.tokens_per_s * point.itl_s))
    sentence = (
        f"{tokens_per_s:.0f} tokens per second are {answers:.1f} answers at the same time, and "
        f"{settings.goals.share:.1%} of the time at most {peak:.1f}. They need {count} decode workers, of which each "
        f"makes {point.tokens_per_s:.0f} tokens per second with {point.itl_s * 1e3:.1f} ms between tokens."
    )
    if point.itl_s > goal_s:
        sentence += f" No load of a worker reaches the goal of {goal_s * 1e3:.1f} ms."
    return Reason(
        PlannedRole.DECODE,
        "time between tokens",
        count,
        {
            "tokens_per_s": tokens_per_s,
            "answers": answers,
            "answers_peak": peak,
            "context_tokens": demand.context_tokens,
            "correction": correction,
            "worker_tokens_per_s": point.tokens_per_s,
            "worker_itl_s": point.itl_s,
            "goal_s": goal_s,
        },
        sentence,
    )


def _new_tokens(requests: RequestStatistics) -> float:
    return max(1.0, requests.prompt_tokens * (1.0 - requests.cached_share))


def _bounded(factor: float, most: float) -> float:
    return min(most, max(1.0 / most, factor))
