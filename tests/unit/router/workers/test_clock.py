"""A worker's clock, estimated from its messages."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_router.workers.clock import WorkerClock

SECOND = 10**9
HOUR = 3600 * SECOND

offsets = st.integers(-24 * HOUR, 24 * HOUR)
delays = st.integers(0, 3 * SECOND)


def clock_of(offset: int, *, request: int = 0, there: int = 0, back: int = 0) -> WorkerClock:
    """A clock after one exchange. `offset` is the worker's clock minus our monotonic one."""
    clock = WorkerClock()
    sent = request + there
    clock.answered(sent + offset, request_ns=request, received_ns=sent + back)
    return clock


@given(offsets, delays, delays, st.lists(delays, max_size=20))
def test_the_estimate_is_behind_by_at_most_its_error_and_never_ahead(
    offset: int, there: int, back: int, later: list[int]
) -> None:
    clock = clock_of(offset, there=there, back=back)
    now = there + back
    for delay in later:
        now += SECOND
        clock.received(now + offset, received_ns=now + delay)
    error = clock.error_ns
    assert error is not None
    assert now + offset - error <= clock.unix_ns(now) <= now + offset
    if len(later) < 8:
        assert error <= there + back


def test_one_slow_message_does_not_spoil_the_estimate() -> None:
    clock = clock_of(HOUR, there=1000, back=1000)
    clock.received(5 * SECOND + HOUR, received_ns=8 * SECOND)
    assert clock.unix_ns(0) == HOUR - 1000


def test_a_clock_that_is_set_forward_is_known_at_once() -> None:
    clock = clock_of(0)
    clock.received(SECOND + HOUR, received_ns=SECOND)
    assert clock.unix_ns(SECOND) == SECOND + HOUR
    assert clock.error_ns is None, "no round trip bounds the new clock"


def test_a_clock_that_is_set_back_is_known_after_eight_messages() -> None:
    clock = clock_of(0)
    for message in range(8):
        assert clock.unix_ns(0) == 0
        clock.received(message * SECOND - HOUR, received_ns=message * SECOND)
    assert clock.unix_ns(0) == -HOUR


def test_a_new_exchange_replaces_what_was_known() -> None:
    clock = clock_of(HOUR)
    clock.answered(-HOUR, request_ns=0, received_ns=0)
    assert clock.unix_ns(0) == -HOUR


def test_without_a_message_the_own_clock_counts() -> None:
    clock = WorkerClock()
    assert not clock.known
    assert clock.error_ns is None
    assert abs(clock.offset_s()) < 1


def test_setting_the_own_clock_does_not_change_the_worker_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = clock_of(HOUR)
    before = clock.unix_ns(0)
    set_ns = time.time_ns() + 5 * HOUR
    monkeypatch.setattr(time, "time_ns", lambda: set_ns)
    assert clock.unix_ns(0) == before
