"""Faults of random size are planted in random timelines, and the verdict names them. Nothing is named without one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import combinations
from statistics import median_low

import pytest

from headrace_common.latency.breakdown import break_down
from headrace_common.latency.steps import (
    AttemptSteps,
    DecodeSteps,
    FirstTokenBy,
    PrefillSteps,
    RequestSteps,
    alignment_of,
)
from headrace_common.trace_view.model import Link, TraceView
from headrace_common.trace_view.verdict import Culprit, culprit_of

US = 1_000
STAGES_US = {
    "admission": 300,
    "tokenize": 400,
    "route": 500,
    "reserve": 1_500,
    "queue": 200,
    "batch wait": 900,
    "prefill": 60_000,
    "transfer exposed": 3_000,
    "decode wait": 300,
    "first step": 11_000,
    "network": 3_000,
}
"""The usual times of the parts of a request in microseconds, in their order."""
RUNS = 20


class Timeline:
    """Makes requests with times that vary by a quarter, and with clocks that are known within 2 ms."""

    def __init__(self, seed: int, maker: FirstTokenBy = FirstTokenBy.DECODE) -> None:
        self._random = random.Random(seed)
        self._maker = maker

    def magnitude_us(self) -> int:
        return round(self._random.uniform(40_000, 2_000_000))

    def parts_us(self, faults_us: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        """The parts of one request to the first token and to the second."""
        took = {
            stage: round(usual_us * self._random.uniform(0.75, 1.25)) + faults_us.get(stage, 0)
            for stage, usual_us in STAGES_US.items()
        }
        network, faulty_way = took["network"] // 3, self._random.randrange(3)
        ways = [network if way != faulty_way else took["network"] - 2 * network for way in range(3)]
        times = [0]
        for stage in ("admission", "route", "reserve", "queue"):
            times.append(
                times[-1] + took[stage] + (took["tokenize"] if stage == "admission" else 0)
            )
        admitted, routed, reserved, pulled = times[1:]
        received = pulled + ways[0]
        computing = received + took["batch wait"]
        computed = computing + took["prefill"]
        landed = computed + took["transfer exposed"]
        stepping = landed + took["decode wait"]
        made = stepping + took["first step"]
        token = made + ways[1]
        by_prefill = self._maker is FirstTokenBy.PREFILL
        sent = computed + ways[1] if by_prefill else landed
        attempt = AttemptSteps(
            admitted,
            routed,
            reserved=reserved,
            queued=reserved,
            pulled=pulled,
            remote=True,
            first_token_by=self._maker,
            decode=DecodeSteps(
                routed + took["reserve"] // 2,
                reserved=reserved,
                kv_arrived=landed,
                step_start=stepping,
                first_token=made,
            ),
            prefill=PrefillSteps(received, computing, computed, computing + 9, landed, computed),
            error_us=2_000,
        )
        attempt.move(self._random.randint(-1_000, 1_000), self._random.randint(-1_000, 1_000))
        first = (sent if by_prefill else token, 0)
        second = (token, 0) if by_prefill else None
        attempt.move(*alignment_of(attempt, first[0], second and second[0]))
        tokenize = (admitted - took["tokenize"], admitted)
        steps = RequestSteps(
            0,
            tokenize=tokenize,
            attempts=[attempt],
            first_token=first,
            second_token=second,
            first_message=first[0] + ways[2],
        )
        found = break_down(steps, token + 9)
        sums = [one.parts_us if one is not None else {} for one in (found.first, found.second)]
        for one in (found.first, found.second):
            assert one is None or sum(one.parts_us.values()) == one.total_us
        first_us, second_us = (
            {part.label.replace("_", " "): time_us for part, time_us in one.items()} for one in sums
        )
        return first_us, second_us

    def culprit(self, faults_us: Mapping[str, int], links: tuple[Link, ...] = ()) -> Culprit | None:
        """The culprit of a request with these faults, beside 20 others without one."""
        others = [self.parts_us({}) for _ in range(RUNS)]
        first, second = self.parts_us(faults_us)
        usual, second_usual = (
            {
                part: US * median_low([one[number].get(part, 0) for one in others])
                for part in (*STAGES_US, "unaccounted")
            }
            for number in range(2)
        )
        view = TraceView(
            *("t", "r", 0, True),
            ttft_ns=US * sum(first.values()),
            total_ns=US * sum((*first.values(), *second.values())),
            parts={part: US * time_us for part, time_us in first.items()},
            links=links,
            steps=(),
            second_parts={part: US * time_us for part, time_us in second.items()},
            usual=usual,
            second_usual=second_usual if second else {},
            clock_error_ns=2_000 * US,
        )
        return culprit_of(view)


@pytest.mark.parametrize("maker", [FirstTokenBy.DECODE, FirstTokenBy.PREFILL])
def test_nothing_is_named_in_runs_without_a_fault(maker: FirstTokenBy) -> None:
    assert [Timeline(seed, maker).culprit({}) for seed in range(RUNS)] == [None] * RUNS


@pytest.mark.parametrize("maker", [FirstTokenBy.DECODE, FirstTokenBy.PREFILL])
@pytest.mark.parametrize("stage", STAGES_US)
def test_a_planted_fault_is_named(stage: str, maker: FirstTokenBy) -> None:
    for seed in range(RUNS):
        timeline = Timeline(seed, maker)
        found = timeline.culprit({stage: timeline.magnitude_us()})
        assert found is not None, seed
        assert found.part == stage, seed


def test_of_two_planted_faults_the_greater_is_named() -> None:
    for seed, pair in enumerate(combinations(STAGES_US, 2)):
        timeline = Timeline(seed)
        less_us = timeline.magnitude_us()
        faults_us = dict(zip(pair, (less_us, 2 * less_us), strict=True))
        found = timeline.culprit(faults_us)
        assert found is not None
        assert found.part == pair[1], (seed, pair)
