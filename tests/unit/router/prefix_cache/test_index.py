"""The prefix index alone: slots, sweeps, bounds, tiers, and sets with holes."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace_common.errors import InternalError
from headrace_engine.prefix_event_log import SNAPSHOT_HASHES_MAX, PrefixEventLog
from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.events import KvEvent, Tier, pack_hashes
from headrace_kv.prefix.hashing import PrefixHasher, PromptHashes
from headrace_router.prefix_cache.block_table import Depths, PrefixTable, by_slot
from headrace_router.prefix_cache.index import ApplyResult, PrefixIndex

A, B, C = (WorkerRef(name, "1") for name in "abc")
HASHER = PrefixHasher(3, 1)
CHAIN = [(n + 1) * 0x9E3779B97F4A7C15 % 2**64 for n in range(2_000)]


def join(index: PrefixIndex, ref: WorkerRef, *chains: Sequence[int]) -> PrefixEventLog:
    publisher = PrefixEventLog(ref.incarnation)
    index.add_worker(ref)
    for chain in chains:
        publisher.stored(None, chain)
    feed(index, ref, publisher.snapshot())
    return publisher


def feed(index: PrefixIndex, ref: WorkerRef, events: Sequence[KvEvent]) -> None:
    for event in events:
        assert index.apply(ref, event) is ApplyResult.APPLIED


def sweep(index: PrefixIndex, budget: int = 100) -> None:
    for _ in range(1_000):
        if not index.sweep(budget):
            return
    raise AssertionError("the sweep does not end")


def credit(
    index: PrefixIndex, prompt: list[int] | PromptHashes, tier: Tier = Tier.DEVICE
) -> dict[WorkerRef, int]:
    """The blocks by worker, of those with any."""
    blocks = index.find(prompt, tier)
    depths = {ref: int(blocks[state.current.slot]) for ref, state in index._states.items()}
    assert sum(depths.values()) == blocks.sum()
    return {ref: depth for ref, depth in depths.items() if depth}


def naive_depths(table: dict[int, int], hashes: Sequence[int], among: int) -> dict[int, int]:
    depths: dict[int, int] = {}
    for slot in range(among.bit_length()):
        depth = 0
        while depth < len(hashes) and table.get(hashes[depth], 0) & among & 1 << slot:
            depth += 1
        if depth:
            depths[slot] = depth
    return depths


def slots(depths: Depths) -> dict[int, int]:
    """The blocks by slot, of those with any."""
    blocks = by_slot(depths, 300)
    return {slot: int(blocks[slot]) for slot in blocks.nonzero()[0].tolist()}


@given(
    held=st.lists(st.integers(0, 300), min_size=1, max_size=40)
    | st.lists(st.sampled_from([7, 8, 9, 64, 130]), min_size=1, max_size=40),
    count=st.integers(0, 300),
    among=st.integers(0, 2**40 - 1) | st.just(-1),
)
@example(held=list(range(300)), count=300, among=-1)
def test_every_lookup_equals_a_linear_scan(held: list[int], count: int, among: int) -> None:
    table = PrefixTable(1_000)
    tokens = np.arange(300, dtype=np.uint32)
    chain = HASHER.hashes(tokens)
    naive: dict[int, int] = {}
    for slot, depth in enumerate(held):
        assert table.add(1 << slot, chain[:depth]) == (depth, 0)
        for block in chain[:depth]:
            naive[block] = naive.get(block, 0) | 1 << slot
    expected = naive_depths(naive, chain[:count], (1 << len(held)) - 1 & among)
    assert slots(table.find(chain[:count], among)) == expected
    assert slots(table.find(HASHER.lazy(tokens[:count]), among)) == expected


@given(
    held=st.lists(st.sets(st.integers(0, 59)), min_size=1, max_size=12),
    blocks_from=st.integers(0, 3),
    count=st.integers(1, 60),
    among=st.integers(1, 2**12 - 1),
)
@example(held=[{0}, {32}], blocks_from=0, count=33, among=2)
def test_holes_never_hide_a_worker_or_stop_a_lookup(
    held: list[set[int]], blocks_from: int, count: int, among: int
) -> None:
    table = PrefixTable(1_000)
    tokens = np.arange(60, dtype=np.uint32)
    chain = HASHER.hashes(tokens)
    naive: dict[int, int] = {}
    for slot, lacking in enumerate(held):
        blocks = [chain[n] for n in range(60) if n < blocks_from or n not in lacking]
        table.add(1 << slot, blocks)
        for block in blocks:
            naive[block] = naive.get(block, 0) | 1 << slot
    least = naive_depths(naive, chain[:count], among)
    for found in (
        slots(table.find(chain[:count], among)),
        slots(table.find(HASHER.lazy(tokens[:count]), among)),
    ):
        assert found.keys() == least.keys()
        for slot, depth in found.items():
            # An undetected hole may give too much credit, but only up to a block that the worker holds.
            assert depth == least[slot] or naive[chain[depth - 1]] >> slot & 1


def test_a_suspended_worker_gets_credit_again_once_its_set_is_known() -> None:
    index = PrefixIndex()
    publisher = join(index, A, CHAIN[:100])
    index.suspend(A)
    assert not index.find(CHAIN).any()
    (lost,) = publisher.removed(CHAIN[90:100])
    (beat,) = publisher.heartbeats()
    assert index.apply(A, beat) is ApplyResult.NEEDS_RESYNC
    assert not index.find(CHAIN).any()
    assert publisher.replay(index.resume_after(A)) == [lost]
    feed(index, A, [lost, beat])
    assert credit(index, CHAIN) == {A: 90}


def test_a_prompt_is_hashed_little_further_than_workers_hold_it() -> None:
    hasher = PrefixHasher(3, 4)
    tokens = list(range(4 * 1_000))
    index = PrefixIndex()
    join(index, A, hasher.hashes(tokens)[:40])
    prompt = hasher.lazy(tokens)
    assert credit(index, prompt) == {A: 40}
    assert len(prompt.checkpoints) == 8
    missed = hasher.lazy([9, *tokens])
    assert not index.find(missed).any()
    assert len(missed.checkpoints) == 0
    assert not index.find(hasher.lazy(tokens[:3])).any()


def test_a_removed_worker_gets_no_credit_and_its_slot_is_free_after_the_sweep() -> None:
    index = PrefixIndex()
    join(index, A, CHAIN[:500], CHAIN[1_000:])
    join(index, B, CHAIN[:300])
    slot, generation = index.slot(A), index.generation
    index.remove_worker(A)
    index.remove_worker(A)
    assert index.generation > generation
    assert credit(index, CHAIN) == {B: 300}
    assert index.block_count == 1_500
    assert index.slot(A) is None
    # Blocks still carry the old bit, so no worker may get it.
    index.add_worker(C)
    assert index.slot(C) != slot
    sweep(index)
    assert index.block_count == 300
    assert not index.sweep()
    join(index, A, CHAIN[300:])
    assert credit(index, CHAIN) == {B: 300}


def test_slots_are_reused_after_many_joins_and_removals() -> None:
    index = PrefixIndex(slots_max=8)
    for number in range(100):
        ref = WorkerRef("w", str(number))
        join(index, ref, CHAIN[: number + 1])
        assert credit(index, CHAIN) == {ref: number + 1}
        index.remove_worker(ref)
    sweep(index)
    assert index.block_count == 0
    for number in range(8):
        index.add_worker(WorkerRef("w", str(number)))
    with pytest.raises(InternalError, match="8 slots"):
        index.add_worker(A)
    with pytest.raises(InternalError, match="already"):
        PrefixIndex.add_worker(index, WorkerRef("w", "0"))


def test_incomplete_snapshots_do_not_use_up_the_slots() -> None:
    index = PrefixIndex(slots_max=3)
    index.add_worker(A)
    publisher = PrefixEventLog("1")
    publisher.stored(None, list(range(1, 2 * SNAPSHOT_HASHES_MAX)))
    for number in range(10):
        publisher.stored(None, [CHAIN[number]])
        assert index.apply(A, publisher.snapshot()[0]) is ApplyResult.APPLIED
    feed(index, A, publisher.snapshot())
    assert credit(index, CHAIN[9:]) == {A: 1}


def test_a_sweep_in_small_slices_between_changes_clears_all_retired_bits() -> None:
    index = PrefixIndex()
    join(index, A, CHAIN)
    publisher = join(index, B, CHAIN[:1_000])
    index.remove_worker(A)
    while index.sweep(37):
        feed(index, B, publisher.removed([CHAIN[999]]))
        feed(index, B, publisher.stored(CHAIN[998], [CHAIN[999]]))
    assert index.block_count == 1_000
    assert credit(index, CHAIN) == {B: 1_000}


def test_a_full_index_credits_the_blocks_that_fit_and_recovers_with_room() -> None:
    index = PrefixIndex(blocks_max=1_000)
    join(index, A, CHAIN[:900])
    publisher = join(index, B, [*CHAIN[:50], *CHAIN[1_000:1_200]])
    assert index.block_count == 1_000
    full = [*CHAIN[:50], *CHAIN[1_000:1_200]]
    assert credit(index, full) == {A: 50, B: 150}
    # The index now ignores stored events of this worker and still applies removals.
    feed(index, B, publisher.stored(None, CHAIN[1_500:1_510]))
    assert not index.find(CHAIN[1_500:]).any()
    feed(index, B, publisher.removed([CHAIN[1_050]]))
    assert credit(index, full) == {A: 50, B: 100}
    feed(index, B, publisher.heartbeats())
    index.remove_worker(A)
    sweep(index)
    (beat,) = publisher.heartbeats()
    assert index.apply(B, beat) is ApplyResult.NEEDS_RESYNC
    assert index.resume_after(B) == 0
    feed(index, B, publisher.snapshot())
    assert credit(index, CHAIN[1_500:]) == {B: 10}


def test_each_tier_has_its_own_depths() -> None:
    index = PrefixIndex()
    index.add_worker(A)
    publisher = PrefixEventLog("1", (Tier.DEVICE, Tier.HOST))
    feed(index, A, publisher.snapshot())
    feed(index, A, publisher.stored(None, CHAIN[:100]))
    feed(index, A, publisher.stored(None, CHAIN[:80], Tier.HOST))
    feed(index, A, publisher.removed(CHAIN[60:100]))
    assert credit(index, CHAIN) == {A: 60}
    assert credit(index, CHAIN, Tier.HOST) == {A: 80}
    feed(index, A, publisher.heartbeats())
    feed(index, A, publisher.snapshot())
    assert credit(index, CHAIN, Tier.HOST) == {A: 80}
    feed(index, A, publisher.cleared())
    assert not index.find(CHAIN, Tier.HOST).any()


def test_a_snapshot_counts_only_when_complete() -> None:
    chain = list(range(1, 2 * SNAPSHOT_HASHES_MAX))
    index = PrefixIndex()
    index.add_worker(A)
    publisher = PrefixEventLog("1")
    publisher.stored(None, chain)
    first, last = publisher.snapshot()
    assert index.apply(A, last) is ApplyResult.NEEDS_RESYNC
    assert not index.find(chain).any()
    assert index.apply(A, first) is ApplyResult.APPLIED
    assert not index.find(chain).any()
    assert index.apply(A, last) is ApplyResult.APPLIED
    assert credit(index, chain) == {A: len(chain)}


def test_a_wrong_digest_removes_the_credit_at_the_next_heartbeat() -> None:
    index = PrefixIndex()
    publisher = join(index, A, CHAIN[:100])
    (event,) = publisher.stored(CHAIN[99], [CHAIN[100]])
    # The count is right but the block is another one: only the exclusive or differs.
    feed(index, A, [event._replace(packed=pack_hashes([12_345]))])
    assert credit(index, CHAIN) == {A: 100}
    (beat,) = publisher.heartbeats()
    assert index.apply(A, beat) is ApplyResult.NEEDS_RESYNC
    assert not index.find(CHAIN).any()
    assert index.resume_after(A) == 0
    feed(index, A, publisher.snapshot())
    assert credit(index, CHAIN) == {A: 101}


def test_events_of_other_incarnations_and_unknown_workers_are_ignored() -> None:
    index = PrefixIndex()
    join(index, A, CHAIN[:10])
    stranger = PrefixEventLog("2")
    for event in stranger.stored(None, CHAIN[:20]) + stranger.snapshot() + stranger.cleared():
        assert index.apply(A, event) is ApplyResult.IGNORED
        assert index.apply(B, event) is ApplyResult.IGNORED
    assert credit(index, CHAIN) == {A: 10}


def test_the_garbage_collector_does_not_track_the_blocks() -> None:
    index = PrefixIndex()
    join(index, A, CHAIN)
    join(index, B, CHAIN[:1_000])
    index.remove_worker(A)
    sweep(index)
    tables = index._tables
    assert not any(gc.is_tracked(table._mask_of) for table in tables)
