"""A worker's clock, estimated from its messages."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_kv.layout import WorkerRef
from headrace_router.workers.connection import WorkerClock

SECOND = 10**9
HOUR = 3600 * SECOND
_OWN_NS = 7 * HOUR
_REF = WorkerRef("d0", "i")

offsets = st.integers(-24 * HOUR, 24 * HOUR)
delays = st.integers(0, 3 * SECOND)


@pytest.fixture(autouse=True)
def still_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's clocks stand still: its wall clock shows _OWN_NS, its monotonic one 0."""
    monkeypatch.setattr(time, "time_ns", lambda: _OWN_NS)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 0)


def ahead_ns(clock: WorkerClock) -> int:
    """How far the worker's wall clock is ahead of our monotonic one."""
    return round(clock.offset_s() * SECOND) + _OWN_NS


@given(offsets, st.lists(delays, min_size=1, max_size=20))
def test_the_estimate_is_behind_by_the_delay_of_the_fastest_of_the_last_messages(
    offset: int, later: list[int]
) -> None:
    clock = WorkerClock(_REF)
    for number, delay in enumerate(later):
        sent = number * SECOND
        clock.received(sent + offset, received_ns=sent + delay)
    assert ahead_ns(clock) == pytest.approx(offset - min(later[-8:]), abs=100)


def test_a_clock_that_is_set_forward_is_known_at_once() -> None:
    clock = WorkerClock(_REF)
    clock.received(0, received_ns=0)
    clock.received(SECOND + HOUR, received_ns=SECOND)
    assert ahead_ns(clock) == HOUR


def test_a_clock_that_is_set_back_is_known_after_eight_messages() -> None:
    clock = WorkerClock(_REF)
    clock.received(0, received_ns=0)
    for message in range(8):
        assert ahead_ns(clock) == 0
        clock.received(message * SECOND - HOUR, received_ns=message * SECOND)
    assert ahead_ns(clock) == -HOUR


def test_without_a_message_the_offset_is_0() -> None:
    clock = WorkerClock(_REF)
    assert not clock.known
    assert clock.offset_s() == 0
