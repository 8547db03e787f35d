"""Plans of copies between tiers, carried out on dictionaries."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace_common.callers.priority import Priority
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.blocks import CachedBlock
from headrace_kv.tiers.tiers import LowerTiers, PoolBlocks, TierHit, TierPlan

DEVICE_BLOCKS = 16


class Memories:
    """The content of every tier's blocks, and the prefixes that were announced."""

    def __init__(self) -> None:
        self.blocks: dict[Tier, dict[int, int]] = {tier: {} for tier in Tier}
        self.announced: dict[Tier, set[int]] = {tier: set() for tier in Tier}

    def carry_out(self, plan: TierPlan) -> None:
        for copy in plan.copies:
            source, destination = self.blocks[copy.source], self.blocks[copy.destination]
            content = [source[block] for block in copy.source_ids]
            assert len(set(copy.destination_ids)) == len(content)
            destination.update(zip(copy.destination_ids, content, strict=True))
        for change in plan.changes:
            known = self.announced[change.tier]
            if change.stored:
                assert not known & set(change.prefixes)
                known.update(change.prefixes)
            else:
                assert known >= set(change.prefixes)
                known.difference_update(change.prefixes)


def used(tiers: LowerTiers) -> dict[Tier, int]:
    """Blocks in use, by tier."""
    return {tier: pool.count - len(pool.free_ids()) for tier, pool in tiers._pools.items()}


def stored(
    tiers: LowerTiers, memories: Memories, *prefixes: int, priority: Priority = Priority.NORMAL
) -> TierPlan:
    """Offers prefixes from blocks of KV memory that contain them."""
    memories.blocks[Tier.DEVICE] = dict(enumerate(prefixes))
    plan = tiers.store(
        [CachedBlock(prefix, block, priority) for block, prefix in enumerate(prefixes)]
    )
    memories.carry_out(plan)
    return plan


def test_a_tier_takes_the_first_blocks_of_a_prompt_that_does_not_fit() -> None:
    tiers, memories = LowerTiers({Tier.HOST: 2}), Memories()
    stored(tiers, memories, 1, 2, 3)
    assert len(tiers.hold([1, 2, 3])) == 2


def test_the_last_block_of_a_prompt_that_came_again_is_evicted_first() -> None:
    tiers, memories = LowerTiers({Tier.HOST: 3}), Memories()
    stored(tiers, memories, 1, 2, 3)
    stored(tiers, memories, 1, 2, 3)
    stored(tiers, memories, 9)
    assert len(tiers.hold([1, 2, 3])) == 2


class TiersMachine(RuleBasedStateMachine):
    """Random stores, holds, loads and losses. Each block contains the prefix that it was stored for."""

    @initialize(host=st.integers(1, 6), disk=st.integers(0, 6))
    def start(self, host: int, disk: int) -> None:
        counts = {Tier.HOST: host} | ({Tier.DISK: disk} if disk else {})
        self.tiers = LowerTiers(counts)
        self.memories = Memories()
        self.held: list[tuple[list[int], TierHit]] = []
        self.fetches: list[PoolBlocks] = []

    @rule(
        prefixes=st.lists(st.integers(0, 20), max_size=8, unique=True),
        priority=st.sampled_from(Priority),
    )
    def store(self, prefixes: list[int], priority: Priority) -> None:
        stored(self.tiers, self.memories, *prefixes, priority=priority)

    @rule(
        prefixes=st.lists(st.integers(0, 20), max_size=8, unique=True),
        priority=st.sampled_from(Priority),
    )
    def hold(self, prefixes: list[int], priority: Priority) -> None:
        hit = self.tiers.hold(prefixes, priority)
        if len(hit) < len(prefixes):
            assert prefixes[len(hit)] not in self.tiers
        self.held.append((prefixes[: len(hit)], hit))

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        if self.held:
            index = data.draw(st.integers(0, len(self.held) - 1))
            prefixes, hit = self.held.pop(index)
            targets = range(DEVICE_BLOCKS, DEVICE_BLOCKS + len(hit))
            self.memories.carry_out(self.tiers.load(hit, targets))
            device = self.memories.blocks[Tier.DEVICE]
            assert [device[block] for block in targets] == prefixes

    @rule(prefixes=st.lists(st.integers(0, 20), max_size=6, unique=True))
    def reserve(self, prefixes: list[int]) -> None:
        blocks, plan = self.tiers.reserve(prefixes)
        self.memories.carry_out(plan)
        self.fetches.append(blocks)

    @rule(data=st.data())
    def end_fetch(self, data: st.DataObject) -> None:
        if self.fetches:
            index = data.draw(st.integers(0, len(self.fetches) - 1))
            blocks = self.fetches.pop(index)
            whole = data.draw(st.integers(0, len(blocks)))
            places = dict(zip(blocks.block_ids[:whole], blocks.prefixes, strict=False))
            self.memories.blocks[Tier.HOST].update(places)
            self.memories.carry_out(self.tiers.fetched(blocks, whole))

    @rule(prefix=st.integers(0, 20))
    def lose(self, prefix: int) -> None:
        """Also a block that is held."""
        hit = self.tiers.hold([prefix])
        self.tiers.release(hit)
        for tier, block in hit.blocks:
            self.memories.carry_out(self.tiers.drop(tier, [block]))
            assert not self.tiers.drop(tier, [block]).changes
            assert not self.tiers.has(prefix, tier, block)

    @rule()
    def clear(self) -> None:
        self.memories.carry_out(self.tiers.clear())

    @invariant()
    def announcements_are_true(self) -> None:
        if hasattr(self, "tiers"):
            reserved = sum(len(blocks) for blocks in self.fetches)
            for tier, count in used(self.tiers).items():
                pending = reserved if tier == Tier.HOST else 0
                lost = {
                    block
                    for prefixes, hit in self.held
                    for prefix, (name, block) in zip(prefixes, hit.blocks, strict=True)
                    if name == tier and not self.tiers.has(prefix, tier, block)
                }
                assert len(self.memories.announced[tier]) + pending + len(lost) == count
            known = set().union(*self.memories.announced.values())
            assert all((prefix in self.tiers) == (prefix in known) for prefix in range(21))


TiersMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTiers = TiersMachine.TestCase
