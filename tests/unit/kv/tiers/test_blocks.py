"""Holders of blocks, and cached prefixes."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace_common.callers.priority import Priority
from headrace_kv.tiers.blocks import BlockPool


def new_pool(count: int = 8) -> tuple[BlockPool, list[int]]:
    cleared: list[int] = []
    return BlockPool(count, cleared.extend), cleared


def test_a_second_block_with_a_cached_prefix_stays_private() -> None:
    pool, cleared = new_pool(4)
    assert pool.allocate(2) == [0, 1]
    pool.register(0, 100)
    pool.register(1, 100)
    pool.free([1])
    assert cleared == [1]
    assert pool.find_cached([100]) == [0]


def test_blocks_of_lower_classes_are_evicted_first() -> None:
    pool, cleared = new_pool(3)
    blocks = pool.allocate(3)
    assert blocks is not None
    for block, priority in zip(blocks, (Priority.HIGH, Priority.LOW, Priority.NORMAL), strict=True):
        pool.register(block, 100 + block, priority)
        pool.free([block])
    for _ in blocks:
        pool.allocate(1)
    assert cleared == [1, 2, 0]


class PoolMachine(RuleBasedStateMachine):
    """Random users of a pool; a plain model counts holders."""

    @initialize()
    def start(self) -> None:
        self.cleared: list[int] = []
        self.pool = BlockPool(6, self.cleared.extend)
        self.held: list[list[int]] = []
        self.next_prefix = 0
        self.known: list[int] = []

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

    @rule(data=st.data(), priority=st.sampled_from(Priority))
    def publish(self, data: st.DataObject, priority: Priority) -> None:
        blocks = [block for held in self.held for block in held]
        if blocks:
            self.pool.register(data.draw(st.sampled_from(blocks)), self.next_prefix, priority)
            self.known.append(self.next_prefix)
            self.next_prefix += 1

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.known:
            found = self.pool.find_cached([data.draw(st.sampled_from(self.known))])
            self.pool.share(found)
            self.held.append(found)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "pool"):
            held = {block for blocks in self.held for block in blocks}
            assert self.pool.available_count == 6 - len(held)
            assert not held & set(self.pool.free_ids())


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
