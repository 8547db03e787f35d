"""The decision by goals: how many workers reach the goals of latency for the predicted requests. Pure.

The prediction of requests by a Kalman filter is the local linear trend with the constants of Dynamo's planner: a level
and a slope, with noise of variance 1.0 and 0.1, and observations of variance 10.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from headrace_planner.observation import Interval, PlannedRole, Reason
from headrace_planner.settings import PlannerSettings, WorkerProfile

_WORKERS_MAX = 100_000


def mean_wait_s(arrivals_per_s: float, service_s: float, workers: int) -> float:
    """Mean time in the queue of a pool of workers, infinite when they cannot serve all arrivals.

    It is Sakasegawa's approximation of M/M/c: arrivals are random, and so are the times of service, because prompts
    differ in length. (H. Sakasegawa, "An approximation formula Lq = a rho^b / (1 - rho)", 1977.)
    """
    utilization = arrivals_per_s * service_s / workers
    if utilization >= 1.0:
        return math.inf
    power = math.pow(utilization, math.sqrt(2.0 * (workers + 1)) - 1.0)
    return service_s * power / (workers * (1.0 - utilization))


def late_share(arrivals_per_s: float, service_s: float, workers: int, wait_s: float) -> float:
    """The share of arrivals that wait longer than `wait_s` for one of the workers, by Erlang's C formula for M/M/c.

    1 when the workers cannot serve all arrivals.
    """
    load = arrivals_per_s * service_s
    if load >= workers:
        return 1.0
    blocked = 1.0
    for count in range(1, workers + 1):
        blocked = load * blocked / (count + load * blocked)
    waiting = blocked / (1.0 - load / workers * (1.0 - blocked))
    return waiting * math.exp(-(workers - load) * wait_s / service_s)


def fewest_workers(
    arrivals_per_s: float, service_s: float, wait_max_s: float, late_share_max: float = 1.0
) -> int:
    """The fewest workers with a mean wait of at most `wait_max_s`, which is positive. 0 without arrivals.

    At most `late_share_max` of the arrivals wait longer than that.
    """
    if arrivals_per_s <= 0.0:
        return 0

    def enough(workers: int) -> bool:
        return (
            mean_wait_s(arrivals_per_s, service_s, workers) <= wait_max_s
            and late_share(arrivals_per_s, service_s, workers, wait_max_s) <= late_share_max
        )

    low = high = math.floor(arrivals_per_s * service_s) + 1
    while high < _WORKERS_MAX and not enough(high):
        low, high = high + 1, high * 2
    return low + bisect_left(range(low, high), True, key=enough)


_LEVEL_NOISE: Final = 1.0
_SLOPE_NOISE: Final = 0.1
_OBSERVATION_NOISE: Final = 10.0
_START_VARIANCE: Final = 1000.0
_POINTS_MIN: Final = 5
"""With fewer values, the last one is the prediction."""
_GROWTH_MAX: Final = 10.0
"""A load that grows more than that from one period to the next does not repeat itself."""

Predictor = Callable[[Sequence[float]], float]
"""The next value of a series, which is not empty. The result is finite and not negative."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """A predicted value, the predictor's name, and that predictor's mean error on the end of the history."""

    value: float
    predictor: str
    mean_error: float


def last_value(history: Sequence[float]) -> float:
    """The last value again."""
    return max(0.0, history[-1])


def local_trend(history: Sequence[float]) -> float:
    """Level plus slope of a Kalman filter."""
    if len(history) < _POINTS_MIN:
        return last_value(history)
    level, slope = history[0], 0.0
    # The covariance of level and slope: ((a, b), (b, d)).
    a, b, d = _START_VARIANCE, 0.0, _START_VARIANCE
    for value in history[1:]:
        level += slope
        a, b, d = a + 2 * b + d + _LEVEL_NOISE, b + d, d + _SLOPE_NOISE
        total = a + _OBSERVATION_NOISE
        level_gain, slope_gain = a / total, b / total
        error = value - level
        level, slope = level + level_gain * error, slope + slope_gain * error
        a, b, d = (1 - level_gain) * a, (1 - level_gain) * b, d - slope_gain * b
    return max(0.0, level + slope)


def seasonal(period: int) -> Predictor:
    """A predictor for a load with a period: the value one period ago, times the growth since then.

    Growth is the ratio of the means of the last quarter of a period and of the same quarter one period before. It is at
    most 10.
    """

    def predict(history: Sequence[float]) -> float:
        window = max(1, period // 4)
        if len(history) < period + window:
            return last_value(history)
        recent = sum(history[-window:])
        before = sum(history[-window - period : -period])
        growth = min(_GROWTH_MAX, recent / before) if before > 0 else 1.0
        return max(0.0, history[-period] * growth)

    return predict


def forecast(history: Sequence[float], period: int, backtest_share: float) -> Forecast:
    """The prediction of the predictor with the least error on the last `backtest_share` of the history.

    `period` is the length of the load's season in values, 0 for none. Values before the first request are skipped: a
    service without users has no trend. Values that are not finite count as 0. Without values, the prediction is 0.
    """
    values = _from_first_request(history)
    if not values:
        return Forecast(0.0, "last value", 0.0)
    predictors: dict[str, Predictor] = {"last value": last_value, "local trend": local_trend}
    if period:
        predictors["seasonal"] = seasonal(period)
    start = max(1, len(values) - math.ceil(len(values) * backtest_share))
    errors = {name: _mean_error(predict, values, start) for name, predict in predictors.items()}
    best = min(errors, key=lambda name: errors[name])
    return Forecast(predictors[best](values), best, errors[best])


def _from_first_request(history: Sequence[float]) -> list[float]:
    values = [value if math.isfinite(value) and value > 0 else 0.0 for value in history]
    first = next((index for index, value in enumerate(values) if value), len(values))
    return values[first:]


def _mean_error(predict: Predictor, values: Sequence[float], start: int) -> float:
    """Mean absolute error of the predictions of values[start:], each from the values before it."""
    errors = [abs(predict(values[:index]) - values[index]) for index in range(start, len(values))]
    return sum(errors) / len(errors) if errors else 0.0


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


def decide_by_goals(
    settings: PlannerSettings, profile: WorkerProfile, demand: Demand
) -> tuple[Reason, Reason]:
    """The fewest workers of each role for the demand, before floors and budget."""
    rate = demand.requests.value / demand.duration_s
    return (
        _prefill_rule(settings, profile, demand, rate),
        _decode_rule(settings, profile, demand, rate),
    )


def pool_by_goals(
    settings: PlannerSettings, profile: WorkerProfile, demand: Demand
) -> tuple[Reason]:
    """The fewest workers of both roles for the demand, before floor and budget.

    At least the sum of the shares of workers that prompts and answers keep busy. At most the workers of two pools,
    because placement can use a pool so. Between these, all workers share: a prompt takes longer by what answers take.
    """
    rate = demand.requests.value / demand.duration_s
    answers = _answers(settings, profile, demand, rate)
    apart = _prefill_rule(settings, profile, demand, rate)
    length, service_s = apart.inputs["prompt_tokens"], apart.inputs["service_s"]
    prompts = rate * service_s
    goal_s = settings.goals.ttft_s

    def enough(workers: int) -> bool:
        left = workers - answers.workers
        stretched_s = service_s * workers / left if left > 0 else math.inf
        wait_max_s = goal_s - stretched_s if service_s < goal_s else service_s
        return wait_max_s > 0 and (
            fewest_workers(rate, stretched_s, wait_max_s, 1.0 - settings.goals.share) <= workers
        )

    highest = apart.count + math.ceil(answers.workers)
    lowest = min(highest, math.ceil(prompts + answers.workers))
    count = next((one for one in range(lowest, highest) if enough(one)), highest)
    sentence = (
        f"{rate:.2f} requests per second ({demand.requests.predictor}) with {length:.0f} new prompt tokens keep "
        f"{prompts:.2f} workers busy with prompts, and at most {answers.peak:.1f} answers at the same time "
        f"{answers.workers:.2f} workers: {count} workers do both"
    )
    sentence += (
        f" with a first token within {goal_s * 1e3:.0f} ms for {settings.goals.share:.1%} of them."
        if service_s < goal_s
        else f". A prompt takes more than the goal of {goal_s * 1e3:.0f} ms: no number of workers reaches it."
    )
    return (
        Reason(
            PlannedRole.BOTH,
            "prompts and answers",
            count,
            {
                "requests_per_s": rate,
                "prompt_tokens": length,
                "service_s": service_s,
                "prompt_workers": prompts,
                "answer_workers": answers.workers,
                "answers_peak": answers.peak,
                "goal_s": goal_s,
            },
            sentence,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Answers:
    """The answers under way, and the workers that they need as a fraction. `each` are those of a worker."""

    tokens_per_s: float
    mean: float
    peak: float
    each: float
    step_s: float

    @property
    def workers(self) -> float:
        return self.peak / self.each


def _answers(
    settings: PlannerSettings, profile: WorkerProfile, demand: Demand, rate: float
) -> _Answers:
    each = profile.answers_within(settings.goals.itl_s, demand.context_tokens)
    step_s = profile.step_s(each, demand.context_tokens)
    tokens_per_s = rate * demand.answer_tokens.value
    mean = tokens_per_s * step_s
    peak = mean + NormalDist().inv_cdf(settings.goals.share) * math.sqrt(mean)
    return _Answers(tokens_per_s, mean, peak, each, step_s)


def _prefill_rule(
    settings: PlannerSettings, profile: WorkerProfile, demand: Demand, rate: float
) -> Reason:
    length = max(1.0, demand.prompt_tokens.value * (1.0 - demand.cached_share))
    service_s = profile.prompt_s(length)
    # A hand-over and a step with the answer follow.
    first_s = service_s + profile.handover_s(length) + profile.step_s(1, demand.prompt_tokens.value)
    wait_max_s = settings.goals.ttft_s - first_s
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
        sentence += (
            f", and the first token {first_s * 1e3:.0f} ms, more than the goal of {settings.goals.ttft_s * 1e3:.0f} "
            "ms: no number of workers reaches it."
        )
    return Reason(
        PlannedRole.PREFILL,
        "time to first token",
        count,
        {
            "requests_per_s": rate,
            "prompt_tokens": length,
            "service_s": service_s,
            "first_token_s": first_s,
            "goal_s": settings.goals.ttft_s,
        },
        sentence,
    )


def _decode_rule(
    settings: PlannerSettings, profile: WorkerProfile, demand: Demand, rate: float
) -> Reason:
    answers = _answers(settings, profile, demand, rate)
    goal_s = settings.goals.itl_s
    count = math.ceil(answers.workers)
    sentence = (
        f"{answers.tokens_per_s:.0f} tokens per second are {answers.mean:.1f} answers at the same time, and "
        f"{settings.goals.share:.1%} of the time at most {answers.peak:.1f}. They need {count} decode workers, of "
        f"which each has {answers.each:.1f} answers with {answers.step_s * 1e3:.1f} ms between tokens."
    )
    if answers.step_s > goal_s * (1 + 1e-9):
        sentence += f" No load of a worker reaches the goal of {goal_s * 1e3:.1f} ms."
    return Reason(
        PlannedRole.DECODE,
        "time between tokens",
        count,
        {
            "tokens_per_s": answers.tokens_per_s,
            "answers": answers.mean,
            "answers_peak": answers.peak,
            "context_tokens": demand.context_tokens,
            "worker_answers": answers.each,
            "worker_itl_s": answers.step_s,
            "goal_s": goal_s,
        },
        sentence,
    )
