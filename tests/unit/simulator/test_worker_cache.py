"""The prefix cache of a simulated worker, and the real index that follows its events."""

from __future__ import annotations

from random import Random

from headrace_kv.layout.layout import WorkerRef
from headrace_kv.prefix.events import KvEvent, Tier
from headrace_router.prefix_cache.index import ApplyResult, PrefixIndex
from headrace_simulator.workers import WorkerCache

REF = WorkerRef("prefill-0", "i0")


class Rig:
    """A cache and an index. No event may be refused."""

    def __init__(self, device_blocks: int, host_blocks: int = 0) -> None:
        self.index = PrefixIndex()
        self.index.add_worker(REF)
        self.cache = WorkerCache(REF, device_blocks, host_blocks, self.apply)

    def apply(self, event: KvEvent) -> None:
        assert self.index.apply(REF, event) is ApplyResult.APPLIED

    def depth(self, hashes: list[int], tier: Tier = Tier.DEVICE) -> int:
        return int(self.index.find(hashes, tier).max(initial=0))


def test_the_index_knows_what_the_cache_has() -> None:
    rig = Rig(10)
    rig.cache.use([1, 2, 3])
    assert rig.cache.depths([1, 2, 9]) == (2, 2)
    assert (rig.depth([1, 2, 3]), rig.depth([1, 2, 9]), rig.depth([9, 2])) == (3, 2, 0)


def test_the_least_recently_used_prompt_leaves_from_its_end() -> None:
    rig = Rig(4)
    rig.cache.use([1, 2])
    rig.cache.use([3, 4])
    rig.cache.use([1, 2])
    rig.cache.use([5])
    assert rig.cache.depths([3, 4]) == (1, 1)
    assert rig.cache.depths([1, 2]) == (2, 2)
    assert rig.depth([3, 4]) == 1


def test_main_memory_keeps_what_kv_memory_evicts() -> None:
    rig = Rig(2, host_blocks=3)
    rig.cache.use([1, 2])
    rig.cache.use([3, 4])
    assert rig.cache.depths([1, 2]) == (0, 2)
    assert (rig.depth([1, 2]), rig.depth([1, 2], Tier.HOST)) == (0, 2)
    rig.cache.use([5, 6])
    assert rig.cache.depths([1, 2]) == (0, 1)
    assert rig.cache.depths([3, 4]) == (0, 2)


def test_less_room_evicts_at_once() -> None:
    rig = Rig(4)
    rig.cache.use([1, 2, 3])
    rig.cache.resize(1)
    assert (len(rig.cache), rig.depth([1, 2, 3])) == (1, 1)


def test_random_uses_never_break_the_index() -> None:
    draw = Random(3)
    rig = Rig(20, host_blocks=15)
    prompts = [[group * 100 + place for place in range(draw.randint(1, 12))] for group in range(9)]
    for _ in range(300):
        hashes = draw.choice(prompts)
        rig.cache.use(hashes[: draw.randint(1, len(hashes))])
        for other in prompts:
            device, reached = rig.cache.depths(other)
            assert rig.depth(other) == device
            assert rig.depth(other, Tier.HOST) == reached
        assert len(rig.cache) <= 20
