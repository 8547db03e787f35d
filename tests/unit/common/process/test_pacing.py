"""Streams send slow tokens at once, and fewer messages under load."""

from __future__ import annotations

import time

import pytest

from headrace_common.process.pacing import GAP_MAX_S, GAP_MIN_S, FlushPace, LoopLoad


def test_slow_tokens_are_sent_at_once() -> None:
    pace = FlushPace(LoopLoad())
    assert pace.batch_s(100.0) <= 0
    pace.record_flush(100.0)
    assert pace.batch_s(100.0 + 1.01 * GAP_MIN_S) <= 0


def test_fast_tokens_are_batched_for_the_rest_of_the_gap() -> None:
    pace = FlushPace(LoopLoad())
    pace.record_flush(100.0)
    assert pace.batch_s(100.0005) == pytest.approx(GAP_MIN_S - 0.0005)


def test_the_gap_follows_the_load_within_its_bounds() -> None:
    load = LoopLoad()
    for _ in range(50):
        load.adapt(1.0)
    assert load.gap_s == GAP_MAX_S
    load.adapt(0.7)
    assert load.gap_s == GAP_MAX_S, "a load between the thresholds changes nothing"
    for _ in range(50):
        load.adapt(0.1)
    assert load.gap_s == GAP_MIN_S


def test_the_gap_grows_while_the_thread_computes_and_shrinks_while_it_sleeps() -> None:
    load = LoopLoad()
    load.update(time.monotonic())
    ends_s = time.monotonic() + 0.3
    while time.monotonic() < ends_s:
        load.update(time.monotonic())
    assert load.gap_s > GAP_MIN_S
    for _ in range(10):
        time.sleep(0.06)
        load.update(time.monotonic())
    assert load.gap_s == GAP_MIN_S
