"""Lease arithmetic, with the clock in hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_kv.leases import Quarantine, QuarantinePolicy, WriteLease


def test_renewals_extend() -> None:
    lease = WriteLease(10.0, 3.0)
    assert lease.alive(12.9)
    assert lease.renew(12.0, 3.0)
    assert lease.alive(14.9)
    assert not lease.alive(15.0)
    assert lease.remaining_s(14.0) == 1.0
    assert lease.remaining_s(16.0) == 0.0


def test_an_expired_lease_stays_dead() -> None:
    lease = WriteLease(0.0, 1.0)
    assert not lease.renew(1.0, 5.0)
    assert not lease.alive(1.5)


def test_a_revoked_lease_stays_dead() -> None:
    lease = WriteLease(0.0, 10.0)
    lease.revoke()
    assert not lease.alive(0.0)
    assert not lease.renew(0.0, 10.0)


def test_quarantine_outlasts_the_longest_lease() -> None:
    """A renewal read one time to live late still ends within the quarantine."""
    policy = QuarantinePolicy(lease_ttl_s=2.0, transport_s=1.0)
    last_renewal_sent_s = 0.0
    lease = WriteLease(last_renewal_sent_s, 2.0)
    assert lease.renew(1.999, 2.0)
    quarantine = Quarantine(policy, now_s=last_renewal_sent_s)
    now_s = 0.0
    while not quarantine.advance(now_s):
        now_s += policy.tick_s
    assert not lease.alive(now_s - 1.0)


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=60))
def test_standing_still_does_not_count(gaps: list[float]) -> None:
    policy = QuarantinePolicy(lease_ttl_s=1.0, transport_s=1.0)
    quarantine = Quarantine(policy, now_s=0.0)
    now_s = counted_s = 0.0
    for gap in gaps:
        now_s += gap
        counted_s += min(gap, 4 * policy.tick_s)
        over = quarantine.advance(now_s)
        if abs(counted_s - policy.total_s) > 1e-6:
            assert over == (counted_s >= policy.total_s)
