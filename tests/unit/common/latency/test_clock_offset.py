"""The measured offset of another clock lies within its error, and follows a clock that is set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_common.latency.clocks import ClockOffset

DELAYS = st.integers(0, 50_000_000)
EXCHANGES = st.lists(st.tuples(DELAYS, DELAYS, DELAYS), min_size=1, max_size=30)


def exchange(
    clock: ClockOffset, at_ns: int, offset_ns: int, there_ns: int, stay_ns: int, back_ns: int
) -> bool:
    received_ns = at_ns + there_ns + offset_ns
    replied_ns = received_ns + stay_ns
    return clock.add_exchange(at_ns, received_ns, replied_ns, at_ns + there_ns + stay_ns + back_ns)


@given(st.integers(-(10**13), 10**13), EXCHANGES)
def test_the_error_bounds_the_offset(offset_ns: int, delays: list[tuple[int, int, int]]) -> None:
    clock = ClockOffset()
    for number, (there_ns, stay_ns, back_ns) in enumerate(delays):
        assert exchange(clock, number * 10**9, offset_ns, there_ns, stay_ns, back_ns)
        ahead_ns, error_ns = clock.difference
        assert abs(ahead_ns - offset_ns) <= error_ns + 1
    assert clock.known


def test_a_clock_that_is_set_replaces_what_was_known() -> None:
    clock = ClockOffset()
    for number in range(20):
        exchange(clock, number, 0, 100_000, 0, 100_000)
    exchange(clock, 100, 3_000_000_000, 400_000, 0, 0)
    ahead_ns, error_ns = clock.difference
    assert abs(ahead_ns - 3_000_000_000) <= error_ns == 200_000


def test_an_exchange_that_is_added_late_widens_nothing() -> None:
    clock = ClockOffset()
    exchange(clock, 60 * 10**9, 7, 1_000, 0, 1_000)
    known = clock.difference
    # A request that has lasted for a minute, in which the other clock was set or not.
    for offset_ns in (7, 5 * 10**9):
        assert exchange(clock, 0, offset_ns, 50_000, 0, 50_000)
        assert clock.difference == known


def test_an_impossible_exchange_is_ignored() -> None:
    clock = ClockOffset()
    # The other clock was set forward by 1 s between receipt and reply, and the exchange took 1 ms.
    assert not clock.add_exchange(0, 500_000, 1_000_500_000, 1_000_000)
    assert not clock.known
    assert clock.difference == (0, 0)
