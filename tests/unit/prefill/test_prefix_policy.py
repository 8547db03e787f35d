"""When a prefix is fetched, and when it is computed."""

from __future__ import annotations

import pytest

from headrace_kv.layout.layout import WorkerRef
from headrace_prefill.prefix_policy import FetchPolicy

NEAR = WorkerRef("decode-0", "00")
FAR = WorkerRef("decode-1", "00")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def policy(clock: Clock) -> FetchPolicy:
    return FetchPolicy(64, clock)


def test_fewer_tokens_than_the_setting_are_computed(policy: FetchPolicy) -> None:
    assert not policy.prefers_fetch(NEAR, 63)
    assert policy.prefers_fetch(NEAR, 64)


def test_one_slow_fetch_is_outweighed_by_later_ones(policy: FetchPolicy) -> None:
    policy.computed(1_000, 1.0)
    policy.fetched(NEAR, 1_000, 3.0)
    assert not policy.prefers_fetch(NEAR, 1_000)
    for _ in range(3):
        policy.fetched(NEAR, 1_000, 0.1)
    assert policy.prefers_fetch(NEAR, 1_000)


def test_a_failure_ends_fetches_from_that_worker_for_a_while(
    policy: FetchPolicy, clock: Clock
) -> None:
    policy.failed(FAR)
    assert not policy.prefers_fetch(FAR, 1_000)
    assert policy.prefers_fetch(NEAR, 1_000)
    clock.now_s += 31.0
    assert policy.prefers_fetch(FAR, 1_000)


def test_a_prompt_that_was_not_computed_says_nothing(policy: FetchPolicy) -> None:
    policy.computed(0, 0.0)
    policy.fetched(FAR, 1_000, 2.0)
    assert policy.prefers_fetch(FAR, 1_000)
