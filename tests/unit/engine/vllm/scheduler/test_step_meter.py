"""The steps of vLLM, as its scheduler's hooks show them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace_common.time_model.model import Step
from headrace_engine.vllm.scheduler.step_meter import StepMeter, step_of


def output(
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    drafts: dict[str, list[int]] | None = None,
) -> Any:
    """A step, with the computed tokens and the tokens of each request."""
    new, cached = new or {}, cached or {}
    counts = {name: count for name, (_, count) in {**new, **cached}.items()}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed)
            for name, (computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[computed for computed, _ in cached.values()]
        ),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens=drafts or {},
    )


def test_answers_count_with_their_context() -> None:
    step = step_of(output({"a": (99, 1)}, {"b": (10, 1), "c": (20, 1)}))
    assert step == Step(running=3, context_tokens=129)


def test_a_part_of_a_prompt_attends_to_what_is_before_it() -> None:
    assert step_of(output(cached={"a": (512, 256)})) == Step(256, 256 * (512 + 128))


def test_prompts_and_answers_share_a_step() -> None:
    step = step_of(output({"a": (0, 100)}, {"b": (300, 1)}))
    assert step == Step(100, 100 * 50, 1, 300)


def test_drafts_make_no_prompt_of_an_answer() -> None:
    step = step_of(output(cached={"a": (300, 4)}, drafts={"a": [1, 2, 3]}))
    assert step == Step(running=1, context_tokens=300)


class Clock:
    """Set by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def run(meter: StepMeter, clock: Clock, step: Any, *, seconds: float, idle_s: float = 0.0) -> None:
    """Plans a step after a pause, and ends it."""
    clock.now_s += idle_s
    meter.planned(step)
    clock.now_s += seconds
    meter.ended()


def test_steps_that_continue_contain_the_time_between() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    for _ in range(20):
        run(meter, clock, output(cached={"a": (100, 1)}), seconds=0.009, idle_s=0.001)
    times = meter.times
    assert times.answer_steps == 20
    # The first step had nothing before it.
    assert times.fixed_s + times.s_per_answer + 100 * times.s_per_context_token == pytest.approx(
        0.01, rel=0.01
    )


def test_steps_of_new_requests_begin_when_they_are_planned() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    for _ in range(20):
        run(meter, clock, output({"a": (0, 64)}), seconds=0.03, idle_s=5.0)
    times = meter.times
    assert times.prompt_steps == 20
    predicted = times.fixed_s + times.prompt_s + 64 * times.s_per_prompt_token
    assert predicted + 64 * 32 * times.s_per_attended_token == pytest.approx(0.03)


def test_steps_overlap_with_pipeline_stages() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    meter.planned(output({"a": (0, 64)}))
    for _ in range(20):
        meter.planned(output(cached={"b": (64, 64)}))
        clock.now_s += 0.02
        meter.ended()
    assert meter.times.prompt_steps == 20
    assert meter.times.error_p90 < 0.05


def test_an_end_without_a_step_is_ignored() -> None:
    meter = StepMeter(Clock())
    meter.ended()
    assert meter.times.answer_steps == 0


def test_steps_without_tokens_teach_nothing() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    run(meter, clock, output(), seconds=1.0)
    assert meter.times.answer_steps == meter.times.prompt_steps == 0
