"""The leases of members against two plain dictionaries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_registry.store.etcd_store import MemberLeases

_CHANGES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=20)


@given(_CHANGES)
def test_a_lease_has_the_member_that_got_it_last(changes: list[tuple[str, int]]) -> None:
    leases, plain = MemberLeases(), dict[str, int]()
    for number, (worker_id, kind) in enumerate(changes, start=1):
        if kind == 0:
            assert leases.pop(worker_id) == plain.pop(worker_id, 0)
        else:
            # etcd never grants a lease twice, but an incarnation may write its record again.
            lease = plain.get(worker_id, number) if kind == 1 else number
            leases.put(worker_id, lease)
            plain[worker_id] = lease
        for lease in range(1, len(changes) + 1):
            owner = next((name for name, held in plain.items() if held == lease), None)
            assert leases.worker_of(lease) == owner
    assert leases.take_all() == plain
    assert leases.take_all() == {}
    assert all(leases.worker_of(lease) is None for lease in range(len(changes) + 1))
