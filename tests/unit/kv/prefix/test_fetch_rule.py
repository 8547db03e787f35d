"""When KV is fetched, and when it is computed."""

from __future__ import annotations

import pytest

from headrace_common.time_model.model import StepTimes
from headrace_kv.prefix.fetch_rule import FetchRule
from tests.set_clock import SetClock

NEAR = "decode-0"
FAR = "decode-1"
# A token takes 1 ms to compute.
LEARNED = StepTimes(fixed_s=0.05, s_per_prompt_token=1e-3, prompt_steps=5)
TOKEN_BYTES = 100


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def rule(clock: SetClock) -> FetchRule:
    return FetchRule(0.2, clock)


def prefers(
    rule: FetchRule,
    link: str,
    start: int = 0,
    end: int = 1_000,
    token_bytes: int = TOKEN_BYTES,
    steps: StepTimes = LEARNED,
) -> bool:
    return rule.prefers_fetch(link, start, end, (end - start) * token_bytes, steps)


def fetch(rule: FetchRule, link: str, s_per_token: float, count: int = 3) -> None:
    """Fetches of several sizes."""
    for tokens in range(100, 100 * count + 100, 100):
        rule.fetched(link, tokens * TOKEN_BYTES, tokens * s_per_token)


def test_few_tokens_are_computed_unless_all_are_fetched(rule: FetchRule, clock: SetClock) -> None:
    assert not prefers(rule, NEAR, 32, 95)
    assert not rule.may_fetch(NEAR, 63)
    assert prefers(rule, NEAR, 32, 96)
    assert prefers(FetchRule(0.0, clock), NEAR, 32, 33, steps=StepTimes())


def test_a_prefix_is_fetched_where_the_learned_times_say_that_it_saves_its_share(
    rule: FetchRule,
) -> None:
    fetch(rule, FAR, 0.85e-3)
    assert not prefers(rule, FAR)
    fetch(rule, NEAR, 0.75e-3)
    assert prefers(rule, NEAR)


@pytest.mark.parametrize(("token_bytes", "fetched"), [(700_000, True), (900_000, False)])
def test_before_anything_is_learned_bytes_take_a_cautious_time(
    clock: SetClock, token_bytes: int, fetched: bool
) -> None:
    assert prefers(FetchRule(0.2, clock), FAR, token_bytes=token_bytes) is fetched


def test_without_times_of_steps_a_prefix_is_computed(rule: FetchRule) -> None:
    fetch(rule, NEAR, 1e-6)
    assert not prefers(rule, NEAR, steps=StepTimes())


def test_a_slow_worker_is_measured_again_after_a_while(rule: FetchRule, clock: SetClock) -> None:
    fetch(rule, FAR, 2e-3)
    assert not prefers(rule, FAR)
    clock.now_s += 299.0
    assert not prefers(rule, FAR)
    clock.now_s += 2.0
    assert prefers(rule, FAR)
    assert not prefers(rule, FAR)


def test_a_failure_ends_fetches_from_that_worker_for_a_while(
    rule: FetchRule, clock: SetClock
) -> None:
    rule.failed(FAR)
    assert not prefers(rule, FAR)
    assert prefers(rule, NEAR)
    clock.now_s += 31.0
    assert prefers(rule, FAR)
