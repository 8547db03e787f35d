"""What requests cost an engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.time_model.model import NO_STEPS, Step, StepTimes
from headrace_engine.receipts import StepColumns, shares
from headrace_engine.steps import StepMeter

_seconds = st.floats(0, 1e-2)
_times = st.builds(
    StepTimes,
    fixed_s=_seconds,
    prompt_s=_seconds,
    s_per_prompt_token=_seconds,
    s_per_attended_token=st.floats(0, 1e-6),
    s_per_answer=_seconds,
    s_per_context_token=st.floats(0, 1e-6),
)


@st.composite
def _steps(draw: st.DrawFn) -> StepColumns:
    count = draw(st.integers(1, 40))
    tokens = st.lists(st.integers(0, 8_192), min_size=count, max_size=count)
    prompts = draw(tokens) if draw(st.booleans()) else ()
    return StepColumns([str(one) for one in range(count)], draw(tokens), prompts)


@given(_steps(), _times | st.just(NO_STEPS), st.floats(0, 100))
def test_shares_add_up_to_the_step(step: StepColumns, times: StepTimes, duration_s: float) -> None:
    found = shares(step, times, duration_s)
    assert len(found) == len(step.request_ids)
    assert min(found) >= 0
    assert sum(found) == pytest.approx(duration_s)


def test_shares_are_as_the_learned_times() -> None:
    times = StepTimes(fixed_s=2.0, s_per_prompt_token=0.5, s_per_answer=1.0)
    # A prompt of 12 tokens and an answer, of 1 + 6 and 1 + 1 seconds.
    assert shares(StepColumns("pa", (0, 50), (12, 0)), times, 18.0) == [14.0, 4.0]


class Time:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), _seconds, _seconds), max_size=30))
def test_time_is_idle_billed_or_of_requests_that_have_no_receipt(
    log: list[tuple[bool, int, float, float]],
) -> None:
    time = Time()
    meter = StepMeter(time)
    costs, billed_s = meter.costs, 0.0
    running: list[str] = []
    for number, (ends, begin, wait_s, step_s) in enumerate(log):
        time.now_s += wait_s
        for one in range(begin):
            running.append(f"{number} {one}")
            costs.request_added(running[-1])
        columns = StepColumns(running[:], [5] * len(running))
        meter.planned(Step(running=len(running)), max(1, len(running)), columns=columns)
        # A reader sees what was idle as soon as it has ended.
        shown = meter.steps.time
        assert shown.idle_s + shown.computing_s == pytest.approx(time.now_s - 100.0)
        time.now_s += step_s
        if ends and running:
            meter.book()
            cost = costs.bill(running.pop())
            billed_s += cost.prefill_s + cost.decode_s
            # The rest of the step's results.
            time.now_s += step_s
        meter.ended()
    meter.idle()
    found = meter.steps.time
    assert found.idle_s + found.computing_s == pytest.approx(time.now_s - 100.0)
    assert found.billed_s == pytest.approx(billed_s)
    left = [costs.bill(one) for one in running]
    assert sum(one.decode_s for one in left) + billed_s == pytest.approx(found.computing_s)


def test_a_request_that_has_ended_has_no_share_of_a_later_step() -> None:
    time = Time()
    meter = StepMeter(time)
    for name in "ab":
        meter.costs.request_added(name)
    meter.planned(Step(running=2), 2, columns=StepColumns("ab", (1, 1)))
    meter.costs.drop("a")
    time.now_s += 3.0
    meter.ended()
    assert meter.costs.bill("b").decode_s == pytest.approx(3.0)
    assert meter.costs.bill("a").decode_s == 0.0
