"""Holders of blocks, cached prefixes, free blocks as runs, and the order of reuse."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace_common.callers.priority import Priority
from headrace_kv.tiers.blocks import BlockPool, FreeRuns, IdleBlocks

COUNT = 24


def scanned(free: list[bool], count: int) -> list[int]:
    """What `take` returns, found by a scan of all blocks."""
    ids = np.flatnonzero(free)
    runs = np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1)
    fitting = [run for run in runs if len(run) >= count]
    if fitting:
        return list(map(int, min(fitting, key=len)[:count]))
    runs.sort(key=len, reverse=True)
    return list(map(int, np.concatenate(runs)[:count]))


@given(st.lists(st.tuples(st.booleans(), st.randoms(use_true_random=False)), max_size=60))
@settings(max_examples=300, deadline=None)
def test_runs_agree_with_a_scan_of_all_blocks(steps: list[tuple[bool, Random]]) -> None:
    runs, free = FreeRuns(COUNT), [True] * COUNT
    for takes, random in steps:
        if takes:
            count = random.randint(0, sum(free))
            changed = scanned(free, count) if count else []
            assert runs.take(count) == changed
        else:
            held = [block for block in range(COUNT) if not free[block]]
            changed = random.sample(held, random.randint(0, len(held)))
            runs.add(changed)
        for block in changed:
            free[block] = not takes
        assert runs.ids() == tuple(np.flatnonzero(free).tolist())
        assert runs.count == sum(free)


def idle(count: int, *blocks: tuple[int, Priority]) -> IdleBlocks:
    found = IdleBlocks(count)
    for block, priority in blocks:
        found.add(block, priority)
    return found


@given(st.lists(st.sampled_from(Priority), min_size=1, max_size=12))
def test_lower_classes_come_first_and_older_blocks_within_a_class(classes: list[Priority]) -> None:
    blocks = idle(len(classes), *enumerate(classes))
    wanted = sorted(range(len(classes)), key=lambda block: (-classes[block], block))
    assert [blocks.pop() for _ in classes] == wanted
    assert len(blocks) == 0


@given(st.lists(st.integers(1, 5), max_size=20), st.sampled_from(Priority))
def test_blocks_of_one_class_are_reused_in_their_order(
    counts: list[int], priority: Priority
) -> None:
    blocks, added, popped = IdleBlocks(3), 0, 0
    for count in counts:
        for block in range(added, added + count):
            blocks.add(block, priority)
        added += count
        assert blocks.pop() == popped
        popped += 1
    assert sorted(blocks) == list(range(popped, added))


def test_a_class_protects_a_block_for_one_turn_of_all_blocks() -> None:
    blocks = idle(4, (0, Priority.HIGH))
    for block in range(1, 6):
        blocks.add(block, Priority.NORMAL)
    # After four reuses it is a normal block, behind those that are normal already.
    assert [blocks.pop() for _ in range(6)] == [1, 2, 3, 4, 5, 0]
    blocks = idle(4, (0, Priority.HIGH))
    reused = []
    for block in range(1, 30):
        blocks.add(block, Priority.NORMAL)
        reused.append(blocks.pop())
    assert 0 in reused
    assert reused.index(0) >= 4


def test_a_block_with_a_holder_again_is_not_reused() -> None:
    blocks = idle(3, (0, Priority.LOW), (1, Priority.HIGH))
    blocks.remove(0)
    assert blocks.pop() == 1
    for call in (lambda: blocks.remove(0), blocks.pop):
        with pytest.raises(KeyError):
            call()


class PoolMachine(RuleBasedStateMachine):
    """Random users of a pool; a plain model counts holders."""

    @initialize()
    def start(self) -> None:
        self.cleared: list[int] = []
        self.pool = BlockPool(6, self.cleared.extend)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        available = self.pool.available_count
        taken = self.pool.allocate(count)
        assert (taken is not None) == (count <= available)
        if taken is not None:
            others = {block for blocks in self.held for block in blocks}
            assert len(set(taken)) == count
            assert not others & set(taken)
            self.held.append(taken)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            index = data.draw(st.integers(0, len(self.held) - 1))
            self.pool.free(self.held.pop(index))

    @rule(data=st.data(), prefix=st.integers(0, 8), priority=st.sampled_from(Priority))
    def publish(self, data: st.DataObject, prefix: int, priority: Priority) -> None:
        blocks = [block for held in self.held for block in held]
        if blocks:
            known, block = self.pool.find(prefix), data.draw(st.sampled_from(blocks))
            registered = self.pool.register(block, prefix, priority)
            assert self.pool.find(prefix) == (block if registered else known)
            assert not registered or known is None

    @rule(prefix=st.integers(0, 8))
    def share(self, prefix: int) -> None:
        found = self.pool.find_cached([prefix])
        self.pool.share(found)
        self.held.append(found)

    @rule(prefix=st.integers(0, 8))
    def lose(self, prefix: int) -> None:
        assert self.pool.forget(self.pool.find_cached([prefix])) in ([prefix], [])
        assert self.pool.find(prefix) is None

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "pool"):
            held = {block for blocks in self.held for block in blocks}
            assert self.pool.available_count == 6 - len(held)
            free = set(self.pool.free_ids())
            assert not held & free
            idle = [block for prefix in range(9) for block in self.pool.find_cached([prefix])]
            assert len(free) + len(held | set(idle)) == 6


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
