"""The sums of requests, from their steps."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

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


@given(st.data())
def test_no_stamp_breaks_a_sum(data: st.DataObject) -> None:
    times = st.none() | st.integers(-200, 1_200)
    attempts = tuple(
        data.draw(
            st.builds(
                AttemptSteps,
                st.integers(0, 500),
                start=times,
                reserved=times,
                queued=times,
                pulled=times,
                remote=st.booleans(),
                first_token_by=st.sampled_from(FirstTokenBy),
                decode=st.none() | st.builds(DecodeSteps, st.integers(0, 900), *[times] * 7),
                prefill=st.none() | st.builds(PrefillSteps, st.integers(0, 900), *[times] * 5),
                error_us=st.integers(0, 500),
                route_end=times,
            )
        )
        for _ in range(data.draw(st.integers(0, 3)))
    )
    index = st.integers(0, max(0, len(attempts) - 1))
    tokens = st.none() | st.tuples(st.integers(0, 1_000), index)
    if not attempts:
        tokens = st.none()
    steps = RequestSteps(
        0,
        attempts=attempts,
        first_token=data.draw(tokens),
        second_token=data.draw(tokens),
        first_message=data.draw(times),
    )
    for attempt in attempts:
        moves = alignment_of(attempt, data.draw(times), data.draw(times))
        assert all(abs(move) <= attempt.error_us for move in moves)
        attempt.move(*moves)
    found = break_down(steps, 1_000)
    for one in (found.first, found.second):
        if one is not None:
            assert sum(one.parts_us.values()) == one.total_us >= 0
            assert all(duration > 0 for duration in one.parts_us.values())
    assert found.exposed_us >= 0
    assert found.hidden_us >= 0
