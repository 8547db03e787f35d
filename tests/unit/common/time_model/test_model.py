"""What the time model predicts from the steps and hand-overs of synthetic workers."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest

from headrace_common.rpc.field_bounds import find_excess
from headrace_common.time_model.model import (
    HandoverLearner,
    HandoverTimes,
    Step,
    StepLearner,
    StepTimes,
    TimeModel,
    mean_model,
    time_model_from_proto,
    time_model_to_proto,
)

FIXED_S, PROMPT_S, TOKEN_S, ATTENDED_S, ANSWER_S, CONTEXT_S = 0.01, 2e-3, 3e-4, 2e-8, 6e-4, 1e-7


Measured = tuple[Step, float]
"""A step and its seconds."""


def true_step(prompt_tokens: int, prior_tokens: int, running: int, context_tokens: int) -> Measured:
    attended = prompt_tokens * (prior_tokens + prompt_tokens / 2)
    prompt_s = PROMPT_S + TOKEN_S * prompt_tokens + ATTENDED_S * attended if prompt_tokens else 0.0
    time_s = FIXED_S + prompt_s + ANSWER_S * running + CONTEXT_S * context_tokens
    return Step(prompt_tokens, attended, running, context_tokens), time_s


def random_step(random: Random) -> Measured:
    prompt = random.choice((0, 0, 64, 256, 512))
    running = random.randint(0, 16) if prompt else random.randint(1, 16)
    prior = random.choice((0, 512, 2_048))
    return true_step(prompt, prior, running, running * random.randint(50, 2_000))


def learned(steps: list[Measured], learner: StepLearner | None = None) -> TimeModel:
    learner = learner or StepLearner()
    for step, seconds in steps:
        learner.observe(step, seconds)
    return TimeModel(steps=learner.times)


def test_a_worker_without_prompts_or_answers_predicts_the_others_only() -> None:
    for known, unknown in (((0, 4, 400), (64, 4, 400)), ((256, 0, 0), (256, 1, 10))):
        step = true_step(known[0], 0, *known[1:])
        model = learned([step] * 10)
        assert model.step_s(*known) == pytest.approx(step[1], rel=0.01)
        assert model.step_s(*unknown) is None


def test_prompts_of_one_length_predict_shorter_and_longer_ones() -> None:
    """Their steps leave open what a prompt, a token and a step cost."""
    model = learned([true_step(1_000, 0, 0, 0), *[true_step(0, 0, 1, 1_000)] * 30] * 6)
    for tokens in (64, 512, 4_096):
        assert model.step_s(tokens) == pytest.approx(true_step(tokens, 0, 0, 0)[1], rel=0.2)


@pytest.mark.parametrize("seed", range(5))
def test_the_error_after_50_steps_is_within_15_percent(seed: int) -> None:
    """Each time is up to 10 % longer or shorter than usual, and one in 50 is doubled."""
    random, learner = Random(seed), StepLearner()

    def noisy_step() -> Measured:
        step, seconds = random_step(random)
        factor = 2.0 if random.random() < 0.02 else 1.0
        return step, seconds * factor * random.uniform(0.9, 1.1)

    learned([noisy_step() for _ in range(50)], learner)
    errors = []
    for _ in range(200):
        step, seconds = noisy_step()
        predicted = TimeModel(steps=learner.times).step_s(
            step.prompt_tokens,
            step.running,
            step.context_tokens,
            step.attended_tokens / step.prompt_tokens - step.prompt_tokens / 2
            if step.prompt_tokens
            else 0,
        )
        assert predicted is not None
        errors.append(abs(predicted - seconds) / seconds)
        learner.observe(step, seconds)
    assert sorted(errors)[180] < 0.15
    assert learner.times.error_p90 < 0.15


def test_hand_overs_are_known_by_link() -> None:
    learner = HandoverLearner()
    for number in range(100):
        payload = 1_000_000 + 50_000 * number
        learner.observe(payload, 0.001 + payload / 1e9, "near")
        learner.observe(payload, 0.005 + payload / 1e8, "far")
    near = TimeModel(handovers=learner.times, links=learner.links_to("near"))
    assert learner.links_to("unknown") == {}
    model = TimeModel(links=learner.links_to("far")).with_links_of(near)
    model = replace(model, handovers=learner.times)
    assert model.handover_s(4_000_000, "near") == pytest.approx(0.005, rel=0.1)
    assert model.handover_s(4_000_000, "far") == pytest.approx(0.045, rel=0.1)
    everywhere = model.handover_s(4_000_000)
    assert everywhere is not None
    assert model.handover_s(4_000_000, "unknown") == everywhere
    assert 0.005 < everywhere < 0.045


def test_links_are_bounded() -> None:
    learner = HandoverLearner()
    for number in range(100):
        learner.observe(1_000, 0.001, f"link-{number}")
    known = [number for number in range(100) if learner.links_to(f"link-{number}")]
    assert known == list(range(36, 100))
    model = TimeModel()
    for number in known:
        model = TimeModel(links=learner.links_to(f"link-{number}")).with_links_of(model)
    model = TimeModel(links={"new": HandoverTimes()}).with_links_of(model)
    assert list(model.links) == [*(f"link-{number}" for number in range(37, 100)), "new"]
    for seconds in (2.0, 2.0, 2.0, 0.0):
        learner.observe(1_000, seconds, "slow")
    assert not find_excess(time_model_to_proto(TimeModel(links=learner.links_to("slow"))))


def test_the_mean_of_workers_leaves_out_what_is_unknown() -> None:
    assert mean_model([]) == TimeModel()
    times = HandoverTimes(0.5, 1e-9, 4)
    one = TimeModel(StepTimes(fixed_s=1.0, prompt_steps=6), times, {"d0": times})
    other = TimeModel(StepTimes(fixed_s=3.0, prompt_steps=8), HandoverTimes(count=2))
    assert mean_model([one, other]) == TimeModel(StepTimes(fixed_s=2.0, prompt_steps=7), times)


@pytest.mark.parametrize("lie_s", [1e-9, 3_600.0])
@pytest.mark.parametrize("count", [2, 3, 9])
def test_one_worker_changes_the_mean_of_others_by_a_bounded_factor(
    lie_s: float, count: int
) -> None:
    known = TimeModel(StepTimes(fixed_s=0.1, prompt_steps=9), HandoverTimes(0.1, count=9))
    lie = TimeModel(StepTimes(lie_s, prompt_steps=9), HandoverTimes(lie_s, count=9))
    mean = mean_model([lie, *[known] * count])
    assert (mean.steps.fixed_s, mean.handovers.fixed_s) == pytest.approx((0.1, 0.1))
    slower = TimeModel(StepTimes(fixed_s=0.3, prompt_steps=9))
    assert mean_model([known, slower]).steps.fixed_s == pytest.approx(0.2)


def test_short_steps_are_not_all_learned() -> None:
    learner = StepLearner()
    for _ in range(1_050):
        learner.observe(Step(running=1, context_tokens=10), 1e-3)
    # All of the first 50, then one of 20.
    assert learner.times.answer_steps == 100


def test_messages_keep_every_value() -> None:
    handovers = HandoverTimes(0.001, 1e-9, 7, 0.1, 0.2)
    model = TimeModel(StepTimes(1, 2, 3, 4, 5, 6, 7, 8, 0.1, 0.2), handovers, {"d0": handovers})
    assert time_model_from_proto(time_model_to_proto(model), "w") == model


def test_a_report_of_the_impossible_is_left_out_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for value in (-1.0, math.inf, math.nan, 1e300):
        report = time_model_to_proto(TimeModel(links={"d0": HandoverTimes(s_per_byte=value)}))
        assert time_model_from_proto(report, "hostile") == TimeModel()
    assert [one.args for one in caplog.records] == [("hostile", "s_per_byte")]
