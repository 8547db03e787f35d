"""The sums of requests, from their steps."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from headrace_common.latency.breakdown import break_down
from headrace_common.latency.parts import Sum
from headrace_common.latency.steps import (
    AttemptSteps,
    DecodeSteps,
    FirstTokenBy,
    PrefillSteps,
    RequestSteps,
    alignment_of,
)

DECODE = DecodeSteps(60, reserved=65, kv_arrived=400, step_start=430, first_token=450)
PREFILL = PrefillSteps(
    120, compute_start=130, compute_end=330, first_write=180, last_write=390, sent=395
)


REMOTE = AttemptSteps(
    40, 50, reserved=70, queued=70, pulled=110, remote=True, decode=DECODE, prefill=PREFILL
)


def request(*attempts: AttemptSteps) -> RequestSteps:
    return RequestSteps(
        0,
        tokenize=(10, 30),
        attempts=attempts,
        first_token=(460, len(attempts) - 1),
        first_message=465,
    )


def parts(one: Sum | None) -> dict[str, int]:
    assert one is not None
    assert sum(one.parts_us.values()) == one.total_us
    return {part.label: duration for part, duration in one.parts_us.items()}


def test_a_first_token_from_hidden_state() -> None:
    attempt = replace(
        REMOTE,
        first_token_by=FirstTokenBy.HIDDEN,
        decode=DECODE._replace(hidden_state_arrived=350, sampled=370),
    )
    steps = replace(
        request(attempt), first_token=(380, 0), first_message=380, second_token=(460, 0)
    )
    found = break_down(steps, 1_000)
    first = parts(found.first)
    assert (first["transfer_exposed"], first["first_step"]) == (20, 20)
    assert parts(found.second)["transfer_exposed"] == 20
    assert found.exposed_us == 20


def test_a_pause_before_a_retry_is_no_choice_of_workers() -> None:
    failed = AttemptSteps(40, 41)
    # The workers are chosen in 1 us, and avoided for 100.
    later = replace(REMOTE, route_start=50, route_end=51, start=151)
    found = parts(break_down(request(failed, later), 1_000).first)
    assert (found["route"], found["retry"]) == (1, 10 + 100)


def test_no_stamp_breaks_a_sum() -> None:
    """Of 10,000 requests with retries, fetches, moves of answers, and local and remote prefill, each step anywhere."""
    for seed in range(10_000):
        random = Random(seed)

        def time_us(least: int = -200, random: Random = random) -> int | None:
            return random.choice((None, *[random.randint(least, 1_200)] * 3))

        def some(kind: Any, steps: int, random: Random = random) -> Any:
            stamps = [time_us() for _ in range(steps)]
            return kind(random.randint(0, 900), *stamps) if random.random() < 0.8 else None

        def interval(random: Random = random) -> tuple[int, int] | None:
            return random.choice((None, (random.randint(-9, 900), random.randint(-9, 900))))

        attempts = [
            AttemptSteps(
                random.randint(0, 500),
                *(time_us(), time_us(), time_us(), time_us()),
                remote=random.random() < 0.6,
                first_token_by=random.choice(list(FirstTokenBy)),
                decode=some(DecodeSteps, 7),
                prefill=some(PrefillSteps, 5),
                message=interval(),
                error_us=random.randint(0, 500),
                route_end=time_us(),
            )
            for _ in range(random.randint(0, 3))
        ]
        for attempt in attempts:
            moves = alignment_of(attempt, time_us(), time_us())
            assert all(abs(move) <= attempt.error_us for move in moves)
            attempt.move(*moves)
        first, second = (
            (random.randint(0, 1_000), random.randrange(len(attempts)))
            if attempts and random.random() < 0.8
            else None
            for _ in range(2)
        )
        sent, own = time_us(0), (interval(), interval(), time_us(), time_us())
        steps = RequestSteps(0, *own, attempts, first, second, sent)
        found = break_down(steps, 1_000)
        measured_us = max(first[0], sent or 0) if first else 1_000
        assert sum(found.first.parts_us.values()) == found.first.total_us == measured_us, seed
        if found.second is not None and first and second:
            assert sum(found.second.parts_us.values()) == max(0, second[0] - first[0]), seed
        for one in (found.first, found.second):
            assert one is None or all(duration > 0 for duration in one.parts_us.values())
        assert min(found.exposed_us, found.hidden_us) >= 0
