"""Announced sets are prefix-closed after every event, and as large as possible."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.worker.v1 import worker_pb2
from headrace_common.errors import InternalError, ProtocolViolation
from headrace_engine.prefix_event_log import PrefixEventLog
from headrace_kv.prefix.events import (
    KvEvent,
    Tier,
    event_from_proto,
    unpack_hashes,
    xor_of,
    xor_of_packed,
)

# A small forest: block n's parent is in PARENT[n].
PARENT: dict[int, int | None] = {n: None if n < 3 else (n - 3) // 2 for n in range(40)}
HASH = {n: (n + 1) * 0x9E3779B97F4A7C15 % 2**64 for n in PARENT}
PARENT_HASH = {HASH[n]: None if p is None else HASH[p] for n, p in PARENT.items()}


def closed_part(held: set[int]) -> set[int]:
    """The blocks with all ancestors held."""

    def whole(block: int | None) -> bool:
        return block is None or (block in held and whole(PARENT_HASH[block]))

    return {block for block in held if whole(block)}


class Follower:
    """Applies events literally and checks each of them."""

    def __init__(self) -> None:
        self.sets: dict[int, set[int]] = {tier: set() for tier in Tier}
        self.sequence = 0

    def take(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            self.sequence += 1
            assert event.sequence == self.sequence
            announced = self.sets[event.tier]
            hashes = unpack_hashes(event.packed)
            for block in hashes:
                # One block at a time: the order within an event keeps the set closed too.
                if event.kind == "stored":
                    assert block not in announced
                    announced.add(block)
                else:
                    announced.remove(block)
                assert closed_part(announced) == announced
            if event.kind == "cleared":
                for each in self.sets.values():
                    each.clear()
            assert event.block_count == len(self.sets[event.tier])
            assert event.hash_xor == xor_of(self.sets[event.tier])


changes = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "clear"]),
        st.lists(st.sampled_from(sorted(PARENT)), min_size=1, max_size=6, unique=True),
        st.sampled_from(list(Tier)),
    ),
    max_size=40,
)


@given(changes=changes, tier_count=st.integers(1, 3), event_hashes_max=st.integers(1, 4))
def test_announced_sets_are_closed_and_maximal(
    changes: list[tuple[str, list[int], Tier]], tier_count: int, event_hashes_max: int
) -> None:
    tiers = tuple(Tier)[:tier_count]
    publisher = PrefixEventLog("i", tiers, event_hashes_max=event_hashes_max)
    follower = Follower()
    held: dict[Tier, set[int]] = {tier: set() for tier in tiers}
    for kind, blocks, any_tier in changes:
        tier = any_tier if any_tier in tiers else Tier.DEVICE
        hashes = [HASH[block] for block in blocks]
        if kind == "store":
            # Each with its own parent: engines store out of order too.
            for block in blocks:
                follower.take(publisher.stored(PARENT_HASH[HASH[block]], [HASH[block]], tier))
            held[tier] |= set(hashes)
        elif kind == "remove":
            follower.take(publisher.removed(hashes, tier))
            held[tier] -= set(hashes)
        elif blocks[0] < 2:
            follower.take(publisher.cleared())
            held = {tier: set() for tier in tiers}
        reachable: set[int] = set()
        for at in tiers:
            reachable |= held[at]
            assert follower.sets[at] == closed_part(reachable)
        for beat in publisher.heartbeats():
            assert beat.sequence == follower.sequence
            assert beat.hash_xor == xor_of(follower.sets[beat.tier])
    check_snapshot(publisher, follower)


def check_snapshot(publisher: PrefixEventLog, follower: Follower) -> None:
    parts = publisher.snapshot()
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    for tier in {part.tier for part in parts}:
        seen: set[int] = set()
        for block in (b for part in parts if part.tier == tier for b in unpack_hashes(part.packed)):
            seen.add(block)
            assert closed_part(seen) == seen
        assert seen == follower.sets[tier]


def test_replay_returns_none_for_events_that_were_dropped() -> None:
    publisher = PrefixEventLog("i", replay_hashes_max=6)
    events = [event for n in range(5) for event in publisher.stored(None, [2 * n + 1, 2 * n + 2])]
    assert publisher.replay(5) == []
    assert publisher.replay(2) == events[2:]
    assert publisher.replay(4) == events[4:]
    assert publisher.replay(1) is None
    assert publisher.replay(6) is None


def test_tiers_must_be_in_order_and_known() -> None:
    for tiers in ((), (Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.DEVICE)):
        with pytest.raises(InternalError, match="in order"):
            PrefixEventLog("i", tiers)
    with pytest.raises(InternalError, match="HOST"):
        PrefixEventLog("i").stored(None, [1], Tier.HOST)


def test_invalid_messages_are_refused() -> None:
    tier = worker_pb2.KV_TIER_DEVICE
    for message, words in (
        (worker_pb2.SubscribeKvEventsResponse(tier=tier), "kind"),
        (worker_pb2.SubscribeKvEventsResponse(tier=tier, stored=b"123"), "whole"),
        (worker_pb2.SubscribeKvEventsResponse(stored=b"12345678"), "tier"),
    ):
        with pytest.raises(ProtocolViolation, match=words):
            event_from_proto(message)


@given(hashes=st.lists(st.integers(0, 2**64 - 1)))
def test_both_digests_agree(hashes: list[int]) -> None:
    packed = b"".join(block.to_bytes(8, "little") for block in hashes)
    assert unpack_hashes(packed) == hashes
    assert xor_of_packed(packed) == xor_of(hashes)
