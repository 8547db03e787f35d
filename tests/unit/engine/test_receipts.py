"""What requests cost an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.time_model.model import NO_STEPS, Step, StepTimes
from headrace_engine.receipts import CostLedger, RequestCost, StepColumns
from headrace_engine.steps import StepMeter
from tests.set_clock import SetClock

_seconds = st.floats(0, 1e-2)
_tokens = st.integers(0, 8_192)
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
    counts = draw(st.lists(st.tuples(_tokens, st.just(0) | _tokens), min_size=1, max_size=40))
    return _columns(dict(enumerate(counts)))


def _columns(parts: Mapping[int, tuple[int, int]]) -> StepColumns:
    """A step of requests with their context, and the tokens of their prompts."""
    answers = {str(one): context for one, (context, tokens) in parts.items() if not tokens}
    prompts = [(str(one), *part) for one, part in parts.items() if part[1]]
    return StepColumns([*answers], [*answers.values()], prompts)


def _costs(step: StepColumns, times: StepTimes, duration_s: float) -> dict[str, RequestCost]:
    """What a step costs each of its requests."""
    ledger, names = CostLedger(), [*step.request_ids, *(name for name, *_ in step.prompts)]
    for name in names:
        ledger.request_added(name)
    ledger.step_took(step, times, duration_s)
    return {name: ledger.bill(name) for name in names}


@given(_steps(), _times | st.just(NO_STEPS), st.floats(0, 100))
def test_shares_add_up_to_the_step(step: StepColumns, times: StepTimes, duration_s: float) -> None:
    costs = _costs(step, times, duration_s).values()
    found = [one.prefill_s + one.decode_s for one in costs]
    assert min(found) >= 0
    assert sum(found) == pytest.approx(duration_s)


def test_shares_are_as_the_learned_times() -> None:
    times = StepTimes(fixed_s=2.0, s_per_prompt_token=0.5, s_per_answer=1.0)
    # A prompt of 12 tokens and an answer, of 1 + 6 and 1 + 1 seconds.
    costs = _costs(StepColumns("a", (50,), [("p", 0, 12)]), times, 18.0)
    assert costs["p"] == RequestCost(14.0, 0.0, 12 * 18.0, 12)
    assert costs["a"] == RequestCost(0.0, 4.0, 50 * 18.0)


_Parts = st.dictionaries(
    st.integers(0, 7), st.tuples(st.sampled_from((1, 1, 1, 3)), st.just(0) | st.integers(0, 90))
)
"""Of some requests, what their context grows by and, of prompts, how many tokens of them a step computes."""


@given(
    st.lists(
        st.tuples(_Parts, _times | st.just(NO_STEPS), _seconds, st.integers(0, 40)), max_size=30
    )
)
def test_many_steps_cost_a_request_what_each_of_them_does(
    log: list[tuple[dict[int, tuple[int, int]], StepTimes, float, int]],
) -> None:
    """Requests sit out steps, get tokens of drafts, turn from prompts to answers, and end before a step does."""
    ledger, contexts = CostLedger(), dict.fromkeys(range(8), 10)
    paid: dict[int, list[RequestCost]] = {number: [] for number in contexts}
    for number in contexts:
        ledger.request_added(str(number))
    for parts, times, duration_s, ended in log:
        if ended in paid:
            ledger.drop(str(ended))
            del paid[ended]
        counts = {one: (contexts[one], tokens) for one, (_, tokens) in parts.items()}
        ledger.step_took(_columns(counts), times, duration_s)
        alive = {one: part for one, part in counts.items() if one in paid}
        for name, cost in _costs(_columns(alive), times, duration_s).items():
            paid[int(name)].append(cost)
        for one, (growth, computed) in parts.items():
            contexts[one] += computed or growth
    for number, several in paid.items():
        summed = [sum(column) for column in zip(*map(astuple, several), strict=True)] or [0.0] * 4
        assert astuple(ledger.bill(str(number))) == pytest.approx(tuple(summed), abs=1e-9)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), _seconds, _seconds), max_size=30))
def test_time_is_idle_billed_or_of_requests_that_have_no_receipt(
    log: list[tuple[bool, int, float, float]],
) -> None:
    time = SetClock(100.0)
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
    time = SetClock(100.0)
    meter = StepMeter(time)
    for name in "ab":
        meter.costs.request_added(name)
    meter.planned(Step(running=2), 2, columns=StepColumns("ab", (1, 1)))
    meter.costs.drop("a")
    time.now_s += 3.0
    meter.ended()
    assert meter.costs.bill("b").decode_s == pytest.approx(3.0)
    assert meter.costs.bill("a").decode_s == 0.0
