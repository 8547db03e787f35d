"""Lease arithmetic, with given times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_kv.leases import Quarantine, QuarantinePolicy, WriteLease


def test_renewals_extend() -> None:
    lease = WriteLease(10.0, 10.0, 3.0)
    assert lease.alive(12.9)
    assert lease.renew(12.0, 2.0, 3.0)
    assert lease.alive(14.9)
    assert not lease.alive(15.0)
    assert lease.remaining_s(14.0) == 1.0
    assert lease.remaining_s(16.0) == 0.0


def test_an_expired_lease_stays_expired() -> None:
    lease = WriteLease(0.0, 0.0, 1.0)
    assert not lease.renew(1.0, 1.0, 5.0)
    assert not lease.alive(1.5)
    assert not WriteLease.none().alive(0.0)


def test_a_revoked_lease_stays_revoked() -> None:
    lease = WriteLease(0.0, 0.0, 10.0)
    lease.revoke()
    assert not lease.alive(0.0)
    assert not lease.renew(0.0, 0.0, 10.0)


def test_a_renewal_counts_from_when_it_was_sent() -> None:
    lease = WriteLease(0.0, 0.1, 2.0)
    assert lease.renew(1.9, 0.6, 2.0)
    # The fastest message took 0.1 s.
    assert lease.alive(2.69)
    assert not lease.alive(2.71)
    quick = WriteLease(0.0, 0.5, 2.0)
    assert quick.renew(0.61, 0.6, 2.0)
    assert not quick.alive(2.62)


def test_renewals_read_ever_later_do_not_add_up() -> None:
    """Decode stops after the tenth renewal. The sender reads each renewal as late as possible."""
    ttl_s = 3.0
    lease = WriteLease(0.0, 0.0, ttl_s)
    now_s = 0.0
    for number in range(1, 11):
        sent_s = float(number)
        now_s = max(now_s + 0.999 * lease.remaining_s(now_s), sent_s)
        if not lease.renew(now_s, sent_s, ttl_s):
            break
    assert not lease.alive(10.0 + ttl_s)


@given(
    st.floats(0.0, 0.99),
    st.floats(0.0, 0.99),
    st.lists(st.floats(0.0, 30.0), max_size=30),
)
def test_quarantine_outlasts_every_lease(
    hello_share: float, welcome_share: float, delays_s: list[float]
) -> None:
    """For any delays, the lease is over two times to live after decode sent its last renewal."""
    ttl_s, origin_s = 2.0, 100.0
    latency_s = welcome_share * ttl_s
    hello_s = origin_s - hello_share * (ttl_s - latency_s)
    lease = WriteLease(hello_s, origin_s + latency_s, ttl_s)
    now_s, last_sent_s = origin_s + latency_s, 0.0
    for number, delay_s in enumerate(delays_s, 1):
        sent_s = number * ttl_s / 3
        now_s = max(now_s, origin_s + sent_s + delay_s)
        last_sent_s = sent_s
        lease.renew(now_s, sent_s, ttl_s)
    total_s = QuarantinePolicy(lease_ttl_s=ttl_s, transport_s=0.0).total_s
    assert not lease.alive(origin_s + last_sent_s + total_s + 1e-9)


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=60))
def test_time_in_which_the_process_was_suspended_does_not_count(gaps: list[float]) -> None:
    policy = QuarantinePolicy(lease_ttl_s=1.0, transport_s=1.0)
    quarantine = Quarantine(policy, now_s=0.0)
    now_s = counted_s = 0.0
    for gap in gaps:
        now_s += gap
        counted_s += min(gap, 4 * policy.tick_s)
        over = quarantine.advance(now_s)
        if abs(counted_s - policy.total_s) > 1e-6:
            assert over == (counted_s >= policy.total_s)
