"""Measures the steps of an engine, and finds out when an engine that should step is stalled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from headrace_common.time_model.model import Step, StepLearner, StepTimes
from headrace_engine.receipts import NO_REQUESTS, CostLedger, EngineTime, StepColumns

STEP_STALL_S: Final = 5.0
"""What `step_stall_s` is by default."""
_FACTOR: Final = 4.0
# The first step of its kind may compile code for the shape of its batch.
_FIRST_STEP_S: Final = 120.0
_PERIOD_S: Final = 300.0
_LEARNED_FACTOR: Final = 8.0
_LEARNED_MIN_S: Final = 10.0
_PAUSE_MAX_S: Final = 1.5

_Kind: TypeAlias = tuple[int, bool]
"""The power of two below the number of tokens, and whether some are of prompts."""


def _monotonic_s() -> float:
    """The clock of this process, also while a simulation replaces it."""
    return time.monotonic()


@dataclass(frozen=True, slots=True)
class EngineSteps:
    """An engine's steps until now. `requests` is 0 while it has nothing to do.

    `count` grows with each step, and when the engine gets work again. `tokens` are those of the latest step, and
    `expected_s` is how long such a step may be expected to take. None: it is the first of its kind.
    """

    count: int = 0
    requests: int = 0
    tokens: int = 0
    expected_s: float | None = None
    time: EngineTime = field(default=EngineTime(), compare=False)
    """Without the steps that have not ended."""


@dataclass(frozen=True, slots=True)
class Stall:
    """An engine has not stepped for `age_s`, which is more than `bound_s`.

    The step has `requests` with `tokens`. `silent`: the engine's process has sent nothing while it had no request.
    """

    age_s: float
    bound_s: float
    requests: int
    tokens: int
    silent: bool = False

    def __str__(self) -> str:
        if self.silent:
            return f"its engine has reported nothing for {self.age_s:.1f} s"
        return (
            f"a step of {self.requests} requests and {self.tokens} tokens has taken {self.age_s:.1f} s, more than "
            f"{self.bound_s:.1f} s"
        )


class RunningClock:
    """Seconds in which this process ran, as far as its calls show it. A longer pause between two calls counts 1.5 s.

    So neither a suspended machine nor a stuck event loop makes other processes look late. It needs a call a second.
    """

    def __init__(self, clock: Callable[[], float] = _monotonic_s) -> None:
        self._clock = clock
        self._called_s = clock()
        self._now_s = 0.0

    def now_s(self) -> float:
        """The seconds since the clock was made."""
        called_s = self._clock()
        self._now_s += min(called_s - self._called_s, _PAUSE_MAX_S)
        self._called_s = called_s
        return self._now_s


@dataclass(slots=True)
class _Longest:
    """The two longest steps of the current period, at least one, and of the one before it."""

    since_s: float
    current: list[float]
    previous: list[float] = field(default_factory=list)

    def record(self, duration_s: float, now_s: float) -> None:
        if now_s - self.since_s > _PERIOD_S:
            self.since_s, self.previous, self.current = now_s, self.current, []
        self.current = sorted((*self.current, duration_s), reverse=True)[:2]

    @property
    def expected_s(self) -> float:
        """The second longest, so that one stalled step does not count; of one step, that."""
        longest = sorted(self.current + self.previous, reverse=True)
        return longest[min(1, len(longest) - 1)]


class StepHistory:
    """The longest recent steps of each kind. One thread records, and any thread may read."""

    def __init__(self) -> None:
        self._longest: dict[_Kind, _Longest] = {}

    def record(self, step: Step, duration_s: float, now_s: float) -> None:
        """A step has ended. Its time counts at most as twice the bound that applied to it, about."""
        kind = _kind(step)
        longest = self._longest.get(kind)
        if longest is None:
            self._longest[kind] = _Longest(now_s, [duration_s])
        elif (
            duration_s > longest.current[-1]
            or now_s - longest.since_s > _PERIOD_S
            or not longest.current[1:]
        ):
            bound_s = max(_LEARNED_MIN_S, _LEARNED_FACTOR * longest.expected_s)
            longest.record(min(duration_s, bound_s), now_s)

    def expected_s(self, step: Step) -> float | None:
        """See EngineSteps."""
        longest = self._longest.get(_kind(step))
        return None if longest is None else longest.expected_s


def _kind(step: Step) -> _Kind:
    return (step.prompt_tokens + step.running).bit_length(), step.prompt_tokens > 0


class StepMeter:
    """Measures the steps of an engine, on the thread that plans them. Any thread may read `steps` and `times`.

    Each measured time serves the time model, and the bound beyond which the engine counts as stalled.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._learner = StepLearner()
        self._history = StepHistory()
        # Steps that have not ended, with their start. With pipeline stages there are several.
        self._planned: deque[tuple[Step, float, StepColumns, bool]] = deque()
        self._end_s = 0.0
        # The count of steps, and of the latest one its requests and what it computes. See EngineSteps.
        self._latest = 0, 0, Step()
        self.costs = CostLedger()
        # Until when all time is in the ledger.
        self._booked_s = self._clock()
        self._is_booked = False

    @property
    def times(self) -> StepTimes:
        """What it has learned."""
        return self._learner.times

    @property
    def steps(self) -> EngineSteps:
        """The steps until now."""
        count, requests, step = self._latest
        expected_s = self._history.expected_s(step) if requests else None
        return EngineSteps(count, requests, step.tokens, expected_s, self._time_now())

    def request_added(self) -> None:
        """The engine has a request. From now on it should step."""
        count, requests, _ = self._latest
        if not requests:
            self._latest = count + 1, 1, Step()

    def planned(
        self,
        step: Step,
        requests: int,
        *,
        continues: bool = False,
        columns: StepColumns = NO_REQUESTS,
        waits: bool = False,
    ) -> None:
        """A step is planned. `requests` counts all requests that have not ended. Those in `columns` share its time.

        `continues`: it has requests of the step before. Then it begins when that one ends, so that its time contains
        what the engine does between both. `waits`: it waits for another worker, so its time teaches nothing.
        """
        start_s = 0.0 if continues else self._clock()
        if not (continues or self._planned):
            self.costs.idled(start_s - self._booked_s)
            self._booked_s = start_s
        self._planned.append((step, start_s, columns, waits))
        if requests:
            self._latest = self._latest[0] + 1, requests, step
        else:
            self.idle()

    def ended(self) -> None:
        """The oldest planned step has ended, and its results are handled."""
        if not self._planned:
            return
        if not self._is_booked:
            self.book()
        self._is_booked = False
        step, start_s, _, waited = self._planned.popleft()
        end_s = self._clock()
        duration_s = end_s - max(start_s, self._end_s)
        self._end_s = end_s
        if waited:
            return
        self._learner.observe(step, duration_s)
        self._history.record(step, duration_s, end_s)

    def book(self) -> None:
        """The results of the oldest planned step are known: shares its time. Repeats are ignored until it has ended."""
        if self._is_booked or not self._planned:
            return
        self._is_booked = True
        _, start_s, columns, _ = self._planned[0]
        now_s, booked_s = self._clock(), self._booked_s
        self._booked_s = now_s
        begin_s = max(start_s, booked_s) if any(columns) else now_s
        if begin_s > booked_s:
            self.costs.idled(begin_s - booked_s)
        if any(columns):
            self.costs.step_took(columns, self._learner.times, now_s - begin_s)

    def idle(self) -> None:
        """The last request has ended."""
        self._latest = self._latest[0], 0, Step()

    def _time_now(self) -> EngineTime:
        """What the time was spent on until now, without the steps that are planned."""
        costs = self.costs
        # In this order, a step that begins meanwhile lets no time count twice.
        idle_s, since_s = costs.idle_s, self._booked_s
        waits_s = 0.0 if self._planned else max(0.0, self._clock() - since_s)
        return EngineTime(idle_s + waits_s, costs.computing_s, costs.billed_s)


class StepWatch:
    """Whether an engine is stalled, from the reports of its steps. One event loop owns it.

    `read` returns the steps of an engine in this process, which are read when they are asked for. Without it, the
    engine's own process sends reports, at least one a second.
    """

    def __init__(
        self,
        step_stall_s: float = STEP_STALL_S,
        *,
        read: Callable[[], EngineSteps] | None = None,
        clock: Callable[[], float] = _monotonic_s,
    ) -> None:
        self._step_stall_s = step_stall_s
        self._read = read
        self._clock, self._whole_clock = RunningClock(clock), clock
        self._steps = EngineSteps()
        self._timed_s = clock()
        self._since_s = self._reported_s = self._clock.now_s()

    def report(self, steps: EngineSteps) -> None:
        """The engine's steps until now."""
        self._reported_s, self._timed_s = self._clock.now_s(), self._whole_clock()
        if steps.count != self._steps.count:
            self._since_s = self._reported_s
        self._steps = steps

    @property
    def engine_time(self) -> EngineTime:
        """What the time of one of its devices was spent on until now. Of a running step that is not known."""
        if self._read is not None:
            return self._read().time
        time = self._steps.time
        if self._steps.requests:
            return time
        return replace(time, idle_s=time.idle_s + self._whole_clock() - self._timed_s)

    def stall(self) -> Stall | None:
        """None while the engine steps, or has nothing to do."""
        if self._read is not None:
            self.report(self._read())
        steps, now_s = self._steps, self._clock.now_s()
        silent = not steps.requests
        if silent and self._read is not None:
            return None
        age_s = now_s - (self._reported_s if silent else self._since_s)
        bound_s = self._bound_s()
        if age_s <= bound_s:
            return None
        return Stall(age_s, bound_s, steps.requests, steps.tokens, silent)

    def _bound_s(self) -> float:
        steps = self._steps
        if not steps.requests and steps.count:
            return self._step_stall_s
        if steps.expected_s is None:
            return max(self._step_stall_s, _FIRST_STEP_S)
        return max(self._step_stall_s, _FACTOR * steps.expected_s)
