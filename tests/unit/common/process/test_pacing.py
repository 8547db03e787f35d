"""Streams send slow tokens at once, and fewer messages under load."""

from __future__ import annotations

import time

import pytest

from headrace_common.process import pacing
from headrace_common.process.pacing import GAP_MAX_S, GAP_MIN_S, LoopLoad

MANY, SOME, FEW = 2_000.0, 500.0, 50.0
"""Messages of all streams, a second."""


def test_the_gap_follows_the_load_within_its_bounds() -> None:
    load = LoopLoad()
    for _ in range(50):
        load.adapt(1.0, MANY)
    assert load.gap_s == GAP_MAX_S
    load.adapt(0.12, MANY)
    assert load.gap_s == GAP_MAX_S, "a load between the thresholds changes nothing"
    for _ in range(50):
        load.adapt(0.05, MANY)
    assert load.gap_s == GAP_MIN_S


def test_the_gap_grows_while_the_thread_computes_and_shrinks_while_it_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, busy_s = 100.0, 0.0
    monkeypatch.setattr(pacing, "_busy_seconds", lambda: busy_s)
    load = LoopLoad()
    load.message_sent(now_s)
    for _ in range(200):
        now_s, busy_s = now_s + 0.0005, busy_s + 0.0005
        load.message_sent(now_s)
    assert load.gap_s > GAP_MIN_S
    for _ in range(100):
        now_s += 0.06
        assert load.message_sent(now_s) == load.gap_s
    assert load.gap_s == GAP_MIN_S


def test_a_thread_that_computes_is_busy() -> None:
    start_s, ends_s = pacing._busy_seconds(), time.monotonic() + 20
    while pacing._busy_seconds() == start_s:
        assert time.monotonic() < ends_s
