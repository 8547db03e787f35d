"""Messages go out at once while there is time, and fewer of them when there is not."""

from __future__ import annotations

import time

import pytest

from headrace_common.process.pacing import GAP_MAX_S, GAP_MIN_S, FlushPace, LoopLoad


def test_slow_tokens_are_never_held_back() -> None:
    pace = FlushPace(LoopLoad())
    assert pace.rest_s(100.0) <= 0
    pace.flushed(100.0)
    assert pace.rest_s(100.0 + 1.01 * GAP_MIN_S) <= 0


def test_fast_tokens_are_gathered_for_the_rest_of_the_gap() -> None:
    pace = FlushPace(LoopLoad())
    pace.flushed(100.0)
    assert pace.rest_s(100.0005) == pytest.approx(GAP_MIN_S - 0.0005)


def test_the_gap_follows_the_load_within_its_bounds() -> None:
    load = LoopLoad()
    for _ in range(50):
        load.judge(1.0)
    assert load.gap_s == GAP_MAX_S
    load.judge(0.7)
    assert load.gap_s == GAP_MAX_S, "between busy and calm nothing changes"
    for _ in range(50):
        load.judge(0.1)
    assert load.gap_s == GAP_MIN_S


def test_a_thread_that_computes_is_seen_to_be_busy_and_one_that_sleeps_calm() -> None:
    load = LoopLoad()
    load.note(time.monotonic())
    ends_s = time.monotonic() + 0.3
    while time.monotonic() < ends_s:
        load.note(time.monotonic())
    assert load.gap_s > GAP_MIN_S
    for _ in range(10):
        time.sleep(0.06)
        load.note(time.monotonic())
    assert load.gap_s == GAP_MIN_S
