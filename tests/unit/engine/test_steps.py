"""When an engine counts as stalled: late steps do, slow ones do not."""

from __future__ import annotations

import pytest

from headrace_common.time_model.model import Step
from headrace_engine.steps import EngineSteps, Stall, StepHistory, StepMeter, StepWatch
from tests.set_clock import SetClock

STALL_S = 5.0
FIRST_S = 120.0


def step(requests: int, tokens: int) -> Step:
    """With several tokens of a request, it is one of a prompt."""
    return Step(prompt_tokens=tokens) if tokens > requests else Step(running=tokens)


class Engine:
    """The meter of an engine's process and the watch of its service, on one clock."""

    def __init__(self, *, reports_regularly: bool = False) -> None:
        self.time = SetClock()
        self.meter = StepMeter(self.time)
        read = None if reports_regularly else lambda: self.meter.steps
        self.watch = StepWatch(STALL_S, read=read, clock=self.time)

    def plan(self, requests: int, tokens: int) -> None:
        """A step begins: the one before it has ended."""
        self.meter.ended()
        self.meter.planned(step(requests, tokens), requests)

    def idle(self) -> None:
        """The last request has ended."""
        self.meter.ended()
        self.meter.idle()

    def wait(self, seconds: float, *, reports: bool = True) -> Stall | None:
        """Time passes. Returns the last stall."""
        end_s = self.time.now_s + seconds
        stall = None
        while self.time.now_s < end_s - 1e-9:
            self.time.now_s = min(end_s, self.time.now_s + 0.1)
            if reports:
                self.watch.report(self.meter.steps)
            stall = self.watch.stall() or stall
        return stall

    def steps(self, count: int, seconds: float, tokens: int = 1, requests: int = 1) -> Stall | None:
        """Steps without a pause. The last one has ended."""
        stall = None
        for _ in range(count):
            self.plan(requests, tokens)
            stall = self.wait(seconds) or stall
        self.plan(requests, 0)
        return stall


def test_a_step_longer_than_the_bound_is_a_stall_until_it_ends() -> None:
    engine = Engine()
    engine.steps(10, 0.02)
    engine.plan(3, 1)
    engine.plan(3, 3)
    engine.steps(2, 0.02, tokens=3, requests=3)
    engine.plan(3, 3)
    assert engine.wait(STALL_S - 0.1) is None
    stall = engine.wait(0.5)
    assert stall is not None
    assert (stall.requests, stall.tokens, stall.bound_s) == (3, 3, STALL_S)
    assert STALL_S < stall.age_s < STALL_S + 0.5
    assert "a step of 3 requests and 3 tokens has taken" in str(stall)
    engine.plan(3, 3)
    engine.watch.report(engine.meter.steps)
    assert engine.watch.stall() is None


def test_the_first_step_of_each_size_may_compile() -> None:
    engine = Engine()
    assert engine.steps(1, 100.0) is None
    # The second longest step counts, so one compilation changes nothing for later steps.
    assert engine.steps(5, 0.02) is None
    # Another size, and prompts beside requests that generate.
    assert engine.steps(1, 60.0, tokens=300) is None
    assert engine.steps(1, 60.0, tokens=3, requests=3) is None
    engine.plan(1, 1)
    assert engine.wait(STALL_S + 0.2) is not None
    engine.plan(1, 2_000)
    assert engine.wait(FIRST_S - 1) is None
    assert engine.wait(2.0) is not None


def test_a_slow_machine_has_longer_bounds() -> None:
    engine = Engine()
    assert engine.steps(3, 12.0, tokens=2_048) is None
    # Four times as long, and no longer.
    assert engine.steps(1, 47.0, tokens=2_048) is None
    engine.plan(1, 2_048)
    assert engine.wait(47.5) is None
    assert engine.wait(1.0) is not None


def test_steps_may_grow_slower_with_the_context() -> None:
    engine = Engine()
    seconds = 0.5
    for _ in range(40):
        assert engine.steps(2, seconds, tokens=512) is None
        seconds *= 1.2


def test_a_stall_makes_the_next_bound_no_longer_but_repeated_ones_do() -> None:
    engine = Engine()
    engine.steps(10, 0.02)
    for _ in range(2):
        engine.plan(1, 1)
        stall = engine.wait(60.0)
        assert stall is not None
        assert stall.bound_s == STALL_S
    engine.plan(1, 1)
    stall = engine.wait(60.0)
    assert stall is not None
    # Each counted as 10 s.
    assert stall.bound_s == 40.0


def test_the_history_ends() -> None:
    history = StepHistory()
    history.record(step(1, 1), 9.0, 0.0)
    history.record(step(1, 1), 9.0, 0.0)
    assert history.expected_s(step(1, 1)) == 9.0
    history.record(step(1, 1), 0.1, 400.0)
    assert history.expected_s(step(1, 1)) == 9.0
    history.record(step(1, 1), 0.1, 800.0)
    assert history.expected_s(step(1, 1)) == 0.1
    assert history.expected_s(step(2, 1)) == 0.1
    assert history.expected_s(step(1, 2)) is None


def test_an_idle_engine_has_no_age() -> None:
    engine = Engine()
    engine.steps(3, 0.02)
    engine.idle()
    assert engine.wait(1_000.0) is None
    engine.meter.request_added()
    assert engine.wait(STALL_S - 0.1) is None
    # Idle times are no durations of steps.
    engine.steps(3, 0.02)
    assert engine.meter.steps.expected_s is not None
    assert engine.meter.steps.expected_s < STALL_S


def test_an_engine_that_gets_a_request_and_plans_no_step_is_stalled() -> None:
    engine = Engine()
    engine.steps(3, 0.02)
    for _ in range(2):
        engine.idle()
        engine.meter.request_added()
        engine.plan(1, 1)
    engine.idle()
    engine.meter.request_added()
    assert engine.wait(STALL_S + 0.2) is not None


def test_an_engine_process_that_is_silent_is_stalled_without_requests() -> None:
    engine = Engine(reports_regularly=True)
    engine.steps(3, 0.02)
    engine.idle()
    assert engine.wait(100.0) is None
    stall = engine.wait(STALL_S + 0.2, reports=False)
    assert stall is not None
    assert stall.silent
    assert "its engine has reported nothing for" in str(stall)
    # Until its first step it loads and compiles.
    engine = Engine(reports_regularly=True)
    assert engine.wait(FIRST_S - 1.0, reports=False) is None


def test_a_process_that_was_not_running_finds_no_stall() -> None:
    engine = Engine()
    engine.steps(10, 0.02)
    engine.plan(1, 1)
    engine.watch.report(engine.meter.steps)
    # The machine was suspended, the process stopped, or its event loop stuck.
    engine.time.now_s += 3_600.0
    assert engine.watch.stall() is None
    assert engine.wait(STALL_S - 2.0) is None
    assert engine.wait(1.0) is not None


def test_a_busy_machine_finds_no_stall() -> None:
    """Steps and polls take turns of 0.5 to 1.5 s, with steps that are 50 times as long as before."""
    engine = Engine()
    engine.steps(100, 0.02)
    for number in range(50):
        engine.plan(1, 1)
        engine.time.now_s += 0.5 + (number % 3) / 2
        assert engine.watch.stall() is None
        engine.watch.report(engine.meter.steps)


def test_only_a_new_step_starts_anew() -> None:
    time = SetClock()
    watch = StepWatch(STALL_S, clock=time)
    for _ in range(60):
        watch.report(EngineSteps(7, 1, 1, 0.1))
        time.now_s += 0.1
    assert watch.stall() is not None
    watch.report(EngineSteps(8, 1, 1, 0.1))
    assert watch.stall() is None


def run(meter: StepMeter, time: SetClock, step: Step, *, continues: bool, idle_s: float) -> None:
    """Plans a step after a pause, and ends it after 30 ms."""
    time.now_s += idle_s
    meter.planned(step, 1, continues=continues)
    time.now_s += 0.03
    meter.ended()


@pytest.mark.parametrize(("continues", "idle_s"), [(True, 0.001), (False, 5.0)])
def test_only_a_step_that_continues_contains_the_time_before_it(
    continues: bool, idle_s: float
) -> None:
    time = SetClock()
    meter = StepMeter(time)
    run(meter, time, Step(running=2, context_tokens=100), continues=False, idle_s=0.0)
    for _ in range(20):
        run(meter, time, Step(running=2, context_tokens=100), continues=continues, idle_s=idle_s)
    times = meter.times
    assert times.answer_steps == 21
    predicted = times.fixed_s + 2 * times.s_per_answer + 100 * times.s_per_context_token
    assert predicted == pytest.approx(0.031 if continues else 0.03, rel=0.01)
    assert meter.steps.expected_s == pytest.approx(0.031 if continues else 0.03)


def test_steps_overlap_with_pipeline_stages() -> None:
    time = SetClock()
    meter = StepMeter(time)
    meter.planned(Step(prompt_tokens=64, attended_tokens=64 * 32), 1)
    for _ in range(20):
        meter.planned(Step(prompt_tokens=64, attended_tokens=64 * 32), 2, continues=True)
        time.now_s += 0.02
        meter.ended()
    assert meter.times.prompt_steps == 20
    assert meter.times.error_p90 < 0.05


def test_an_end_without_a_step_is_ignored_and_so_are_steps_without_tokens() -> None:
    meter = StepMeter(SetClock())
    meter.ended()
    meter.planned(Step(), 1)
    meter.ended()
    assert meter.times.answer_steps == meter.times.prompt_steps == 0
