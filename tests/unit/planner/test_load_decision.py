"""The thresholds, the trend, the grace, and no removal that an addition follows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_planner.observation import (
    ClassCounts,
    Interval,
    LoadSample,
    PlannedRole,
    WorkerCounts,
)
from headrace_planner.planner import LoadState, apply_reasons, decide_by_load
from headrace_planner.settings import LoadSettings
from tests.unit.planner.samples import interval, pool_sample, sample

SETTINGS = LoadSettings()


def wanted(observed: Interval, grace: int = 0) -> WorkerCounts:
    reasons, _ = decide_by_load(SETTINGS, observed, LoadState(grace))
    return apply_reasons(observed.counts, reasons)


@pytest.mark.parametrize(
    ("queues", "prefill"),
    [
        ((2, 2), 3),  # 1 per worker, and it stays
        ((2, 3), 3),  # it grows
        ((4, 0), 2),  # 1 per worker on average, but the queue is gone and shrinks
        ((1, 1), 2),  # exactly the threshold
        ((0, 0), 1),
    ],
)
def test_the_queue_and_its_trend_decide_about_prefill(
    queues: tuple[int, ...], prefill: int
) -> None:
    observed = interval(*(sample(queued=queued) for queued in queues))
    assert wanted(observed).prefill == prefill


@pytest.mark.parametrize(
    ("weight", "classes", "prefill"),
    [
        (1.0, ClassCounts(low=4), 3),
        (0.25, ClassCounts(low=4), 2),  # 0.5 for each worker: exactly the threshold
        (0.0, ClassCounts(low=4), 1),
        (0.0, ClassCounts(high=2, low=2), 3),
        (0.0, ClassCounts(), 3),  # an older router does not report classes
    ],
)
def test_queued_prompts_of_class_low_count_by_their_weight(
    weight: float, classes: ClassCounts, prefill: int
) -> None:
    observed = interval(replace(sample(queued=4), queued_by_class=classes))
    settings = SETTINGS.model_copy(update={"low_prompt_weight": weight})
    reasons, _ = decide_by_load(settings, observed, LoadState())
    assert apply_reasons(observed.counts, reasons).prefill == prefill
    for reason in reasons:
        if reason.role is PlannedRole.PREFILL:
            assert reason.inputs["low_prompts"] == classes.low
            assert reason.inputs["high_prompts"] == classes.high
            assert ("Low prompts count" in reason.sentence) == (weight < 1 and classes.low > 0)


@pytest.mark.parametrize(
    ("loads", "waiting", "decode"),
    [
        ((0.95, 0.95), 0, 3),
        ((0.85, 0.85), 3, 3),  # waiting requests: 0.85 + 0.06
        ((0.9, 0.9), 0, 2),  # exactly the threshold
        ((0.5, 0.5), 0, 2),  # exactly the threshold
        ((0.4, 0.4), 0, 1),
        ((0.46, 0.46), 0, 2),  # one worker alone would have 0.92
    ],
)
def test_the_kv_usage_decides_about_decode(
    loads: tuple[float, ...], waiting: int, decode: int
) -> None:
    assert wanted(interval(sample(loads=loads, waiting=waiting))).decode == decode


def test_the_last_worker_of_a_role_stays() -> None:
    observed = interval(sample(prefill=1, loads=(0.0,)))
    assert wanted(observed) == WorkerCounts(1, 1)


SAMPLES = st.builds(
    lambda prefill, queued, loads: sample(prefill=prefill, queued=queued, loads=tuple(loads)),
    st.just(3),
    st.integers(0, 50),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
)


@pytest.mark.parametrize(
    ("queued", "load", "grace", "both"),
    [
        (0, 0.7, 0, 3),
        (6, 0.7, 0, 4),  # prompts wait
        (0, 0.95, 0, 4),  # answers fill the workers
        (6, 0.95, 0, 4),
        (0, 0.3, 0, 2),
        (0, 0.3, 1, 3),
        (1, 0.3, 0, 3),  # prompts need all workers, and answers do not
        (0, 0.65, 0, 3),
    ],
)
def test_prompts_or_answers_add_a_worker_of_both_roles_and_both_remove_one(
    queued: int, load: float, grace: int, both: int
) -> None:
    observed = interval(pool_sample(queued=queued, loads=(load,) * 3))
    assert wanted(observed, grace) == WorkerCounts(0, 0, both)


def test_a_pool_has_one_worker_at_least() -> None:
    assert wanted(interval(pool_sample(loads=(0.0,)))) == WorkerCounts(0, 0, 1)


@given(st.lists(SAMPLES, min_size=1, max_size=5), st.integers(0, 3))
def test_each_role_changes_by_at_most_one_worker(samples: list[LoadSample], grace: int) -> None:
    observed = interval(*samples)
    target = wanted(observed, grace)
    for role in PlannedRole:
        assert abs(target.of(role) - observed.counts.of(role)) <= 1
    if grace:
        assert target.decode >= observed.counts.decode


@given(st.lists(SAMPLES, min_size=1, max_size=5))
def test_a_removal_is_not_followed_by_an_addition(samples: list[LoadSample]) -> None:
    observed = interval(*samples)
    target = wanted(observed)
    after = []
    for one in observed.samples:
        load = one.decode_load * one.counts.decode / target.decode
        after.append(
            sample(prefill=target.prefill, queued=one.queued_prompts, loads=(load,) * target.decode)
        )
    again = wanted(interval(*after))
    for role in PlannedRole:
        if target.of(role) < observed.counts.of(role):
            assert again.of(role) <= target.of(role)
