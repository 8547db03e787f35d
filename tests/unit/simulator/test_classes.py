"""Replays of traces with several classes: shares of the queue, of slots and of blocks."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_common.callers.priority import Priority
from headrace_planner.settings import WorkerProfile
from headrace_simulator.job import ClassResult, SimulationResult
from headrace_simulator.replay import simulate
from headrace_simulator.settings import SimulationSettings
from headrace_simulator.trace import TraceRequest
from tests.unit.simulator.samples import PROFILE, request

HIGH, NORMAL, LOW = Priority.HIGH, Priority.NORMAL, Priority.LOW
FEW_SLOTS = PROFILE.model_copy(update={"max_num_seqs": 12})
FEW_BLOCKS = PROFILE.model_copy(update={"kv_tokens": 4_400})


def replay(
    trace: list[TraceRequest], profile: WorkerProfile = PROFILE, **settings: Any
) -> SimulationResult:
    return simulate(SimulationSettings(**settings), profile, trace)


def at_once(each: int, **fields: Any) -> list[TraceRequest]:
    """So many requests of each class at the same moment, the low ones first."""
    classes = [LOW, NORMAL, HIGH] * each
    return [request(number, priority=priority, **fields) for number, priority in enumerate(classes)]


def by_class(result: SimulationResult) -> dict[str, ClassResult]:
    return {one.priority: one for one in result.classes}


def median_ttft_s(result: SimulationResult) -> list[float]:
    return [one.ttft.percentiles["p50"] for one in result.classes]


@pytest.mark.parametrize(
    ("profile", "settings"),
    [
        (PROFILE.model_copy(update={"max_num_seqs": 128, "kv_tokens": 1_000_000}), {}),
        (FEW_SLOTS, {"prefill_workers": 12}),
        (FEW_BLOCKS, {"prefill_workers": 4}),
    ],
    ids=["queue", "slots", "blocks"],
)
def test_higher_classes_are_served_earlier_and_none_starves(
    profile: WorkerProfile, settings: dict[str, Any]
) -> None:
    result = replay(at_once(20, answer_tokens=40), profile, **settings)
    assert not result.failures
    assert [one.priority for one in result.classes] == ["high", "normal", "low"]
    assert median_ttft_s(result) == sorted(median_ttft_s(result))
    assert median_ttft_s(result)[0] < 0.8 * median_ttft_s(result)[2]
    # The first low request is served while nearly all others wait.
    low = by_class(result)["low"]
    whole_s = result.ttft.percentiles["p99"]
    assert replay_first_s(profile, settings) < whole_s / 4
    assert low.requests == 20
    assert low.failed == 0


def replay_first_s(profile: WorkerProfile, settings: dict[str, Any]) -> float:
    """The time to first token of a single low request among requests of the other classes."""
    trace = [
        one for one in at_once(20, answer_tokens=40) if one.priority is not LOW or not one.number
    ]
    (low,) = (one for one in replay(trace, profile, **settings).classes if one.priority == "low")
    return low.ttft.mean_s
