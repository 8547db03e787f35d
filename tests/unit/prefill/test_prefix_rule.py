"""When a prefix is fetched, and when it is computed."""

from __future__ import annotations

import pytest

from headrace_common.time_model.model import StepTimes
from headrace_kv.layout import WorkerRef
from headrace_prefill.prefix_fetch import FetchRule

NEAR = WorkerRef("decode-0", "00")
FAR = WorkerRef("decode-1", "00")
# A token takes 1 ms to compute.
LEARNED = StepTimes(fixed_s=0.05, s_per_prompt_token=1e-3, prompt_steps=5)
TOKEN_BYTES = 100


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rule(clock: Clock) -> FetchRule:
    return FetchRule(0.2, lambda: LEARNED, TOKEN_BYTES, clock)


def fetch(rule: FetchRule, decode: WorkerRef, s_per_token: float, count: int = 3) -> None:
    """Fetches of several sizes."""
    for tokens in range(100, 100 * count + 100, 100):
        rule.fetched(decode, tokens, tokens * TOKEN_BYTES, tokens * s_per_token)


def test_few_tokens_are_computed_unless_all_are_fetched(rule: FetchRule, clock: Clock) -> None:
    assert not rule.prefers_fetch(NEAR, 32, 95)
    assert not rule.may_fetch(NEAR, 63)
    assert rule.prefers_fetch(NEAR, 32, 96)
    assert FetchRule(0.0, StepTimes, TOKEN_BYTES, clock).prefers_fetch(NEAR, 32, 33)


def test_a_prefix_is_fetched_where_the_learned_times_say_that_it_saves_its_share(
    rule: FetchRule,
) -> None:
    fetch(rule, FAR, 0.85e-3)
    assert not rule.prefers_fetch(FAR, 0, 1_000)
    fetch(rule, NEAR, 0.75e-3)
    assert rule.prefers_fetch(NEAR, 0, 1_000)


@pytest.mark.parametrize(("token_bytes", "fetched"), [(700_000, True), (900_000, False)])
def test_before_anything_is_learned_bytes_take_a_cautious_time(
    clock: Clock, token_bytes: int, fetched: bool
) -> None:
    rule = FetchRule(0.2, lambda: LEARNED, token_bytes, clock)
    assert rule.prefers_fetch(FAR, 0, 1_000) is fetched


def test_without_times_of_steps_a_prefix_is_computed(clock: Clock) -> None:
    rule = FetchRule(0.2, StepTimes, TOKEN_BYTES, clock)
    fetch(rule, NEAR, 1e-6)
    assert not rule.prefers_fetch(NEAR, 0, 1_000)


def test_a_slow_worker_is_measured_again_after_a_while(rule: FetchRule, clock: Clock) -> None:
    fetch(rule, FAR, 2e-3)
    assert not rule.prefers_fetch(FAR, 0, 1_000)
    clock.now_s += 299.0
    assert not rule.prefers_fetch(FAR, 0, 1_000)
    clock.now_s += 2.0
    assert rule.prefers_fetch(FAR, 0, 1_000)
    assert not rule.prefers_fetch(FAR, 0, 1_000)


def test_a_failure_ends_fetches_from_that_worker_for_a_while(rule: FetchRule, clock: Clock) -> None:
    rule.failed(FAR)
    assert not rule.prefers_fetch(FAR, 0, 1_000)
    assert rule.prefers_fetch(NEAR, 0, 1_000)
    clock.now_s += 31.0
    assert rule.prefers_fetch(FAR, 0, 1_000)
