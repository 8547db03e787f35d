"""Which part of the decode slots a router may use: no idle slots, a part for every router, and none used twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_router.workers.table import DecodeSlots


def test_one_router_uses_every_slot_whatever_the_workers_report() -> None:
    assert DecodeSlots(0).available() == 0
    assert DecodeSlots(64).available() == 64
    assert DecodeSlots(64, external=5, routers=1).available() == 64


def test_a_router_gives_back_what_another_one_starts_to_use() -> None:
    # Idle slots of others are used, less one that is free for their next request.
    assert [DecodeSlots(4, external, 2).available() for external in range(5)] == [3, 2, 2, 2, 2]
    assert [DecodeSlots(200, external, 2).available() for external in (0, 50, 150)] == [
        190,
        140,
        100,
    ]


@given(total=st.integers(1, 5_000), routers=st.integers(2, 9), external=st.integers(0, 5_000))
def test_every_router_has_its_part_and_slots_never_idle_for_want_of_a_right(
    total: int, routers: int, external: int
) -> None:
    mine = DecodeSlots(total, external, routers).available()
    assert 1 <= mine <= max(1, total - 1)
    assert mine >= total // routers
    idle = total - external
    # At most a twentieth of the slots, and at least one, stays free for the next requests of others.
    assert mine >= idle - max(1, total // 20)
    if mine > max(1, total // routers):
        assert mine < idle


@given(total=st.integers(8, 400), routers=st.integers(2, 4), data=st.data())
def test_routers_that_all_want_every_slot_share_them_equally(
    total: int, routers: int, data: st.DataObject
) -> None:
    used = [0] * routers
    start = data.draw(st.integers(0, routers - 1))
    # The first router fills up alone. Then the others begin, and ended requests make room.
    used[start] = DecodeSlots(total, 0, routers).available()
    for _ in range(4 * total):
        for router in range(routers):
            others = sum(used) - used[router]
            available = DecodeSlots(total, others, routers).available()
            if used[router] > available:
                used[router] -= 1
            elif used[router] < available and sum(used) < total:
                used[router] += 1
    assert sum(used) <= total
    assert all(one >= total // routers for one in used)
