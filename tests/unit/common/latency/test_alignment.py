"""Clocks that are known within an error move no part of a worker's time to another one."""

from __future__ import annotations

from dataclasses import replace

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

TRUE = AttemptSteps(
    40,
    50,
    reserved=70,
    queued=70,
    pulled=110,
    remote=True,
    decode=DecodeSteps(60, reserved=65, kv_arrived=4_000, step_start=4_030, first_token=4_900),
    prefill=PrefillSteps(
        120, compute_start=130, compute_end=3_300, first_write=1_800, last_write=3_900, sent=3_950
    ),
    error_us=7_000,
)


def parts_of(attempt: AttemptSteps) -> dict[str, int]:
    request = RequestSteps(0, attempts=[attempt], first_token=(4_950, 0), first_message=4_960)
    found = break_down(request, 9_000).first
    assert sum(found.parts_us.values()) == found.total_us == 4_960
    return {part.label: time_us for part, time_us in found.parts_us.items()}


@pytest.mark.parametrize(
    ("prefill_us", "decode_us"), [(5_000, 0), (6_900, -40), (3_000, -2_000), (-4_000, 3_000)]
)
def test_all_steps_of_a_worker_move_together(prefill_us: int, decode_us: int) -> None:
    wrong = replace(TRUE)
    wrong.move(prefill_us, decode_us)
    wrong.move(*alignment_of(wrong, 4_950, None))
    known, found = parts_of(TRUE), parts_of(wrong)
    # What one clock measures stays as it was, and the borders are the only doubt.
    assert (found["prefill"], found["first_step"], found["batch_wait"]) == (
        known["prefill"],
        known["first_step"],
        known["batch_wait"],
    )
    assert found.get("network", 0) <= known["network"] + known["transfer_exposed"]


def test_a_token_that_prefill_made_was_sent_before_it_arrived() -> None:
    late = replace(TRUE, first_token_by=FirstTokenBy.PREFILL)
    late.move(2_000, 0)
    assert alignment_of(late, 3_960, 4_950)[0] == -1_990


def test_known_clocks_move_nothing() -> None:
    assert alignment_of(replace(TRUE, error_us=0), 1, 2) == (0, 0)
    assert alignment_of(TRUE, 4_950, None) == (0, 0)
