"""The prefix cache of a simulated worker, and the real index that follows its events."""

from __future__ import annotations

from headrace_kv.layout import WorkerRef
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


def test_less_room_evicts_at_once() -> None:
    rig = Rig(4)
    rig.cache.use([1, 2, 3])
    rig.cache.resize(1)
    assert (len(rig.cache), rig.depth([1, 2, 3])) == (1, 1)
