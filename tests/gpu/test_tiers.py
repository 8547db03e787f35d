"""Blocks that leave a device's KV memory for main memory and a disk, and return."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from headrace_kv.copy_plan import BlockSpan, CopyPlanner
from headrace_kv.layout import KvLayout, RankMemory
from headrace_kv.prefix.events import Tier
from headrace_kv.shard_map import HEAD_OUTER, Edge, place_regions
from headrace_kv.tiers.copier import TierCopier
from headrace_kv.tiers.tiers import TierCopy
from headrace_kv.transport.factory import open_transport
from tests.gpu.test_streams import keep_busy
from tests.in_memory_transport import KIND

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS = 12
TO_HOST, TO_DISK = (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DISK)
FROM_HOST, FROM_DISK = (Tier.HOST, Tier.DEVICE), (Tier.DISK, Tier.DEVICE)


class Cache:
    """KV memory of a device, of shape [block, byte], and its copier."""

    def __init__(self, device: str, folder: Path) -> None:
        import torch

        from headrace_engine.torch_memory.device_memory import TorchMemory

        layout = KvLayout.attention(
            model="m",
            dtype="float16",
            layer_count=6,
            kv_head_count=4,
            block_tokens=16,
            parts={"kv": 256},
            block_format="token_outer",
        )
        placed = place_regions(layout, 0, (BLOCKS,), HEAD_OUTER)
        self.device = torch.device(device)
        self.data: Tensor = torch.zeros(placed.arena_bytes, dtype=torch.uint8, device=device)
        self.data.copy_(
            torch.from_numpy(
                np.random.default_rng(1).integers(0, 256, placed.arena_bytes, np.uint8)
            )
        )
        self.memory = TorchMemory(self.device)
        address, nbytes = self.memory.hold(self.data)
        self.regions = placed.regions
        self.rank = RankMemory(0, "", "", address, nbytes, placed.regions)
        self.copier = TierCopier(
            layout,
            self.rank,
            {Tier.HOST: BLOCKS, Tier.DISK: BLOCKS},
            str(folder),
            device_memory=self.memory,
        )
        if device != "cpu":
            # The first launch of a kernel may wait for the device.
            torch.cuda._sleep(1)
            torch.cuda.synchronize()

    def blocks(self, *block_ids: int) -> list[bytes]:
        """The bytes of each block in every layer and head."""
        content = self.data.cpu().numpy()
        units = {
            block: [
                content[start : start + region.block_tokens * region.token_stride_bytes].tobytes()
                for region in self.regions
                for head in range(region.head_count)
                for start in (
                    region.offset_bytes
                    + block * region.block_stride_bytes
                    + head * region.head_stride_bytes,
                )
            ]
            for block in block_ids
        }
        return [b"".join(units[block]) for block in block_ids]


@pytest.fixture
def cache(device: str, tmp_path: Path) -> Iterator[Cache]:
    cache = Cache(device, tmp_path)
    yield cache
    cache.copier.close()


def test_blocks_of_a_device_return_with_their_bytes_from_every_tier(cache: Cache) -> None:
    before = cache.blocks(*range(BLOCKS))
    cache.copier.copy(TierCopy(*TO_HOST, (5, 1, 2, 11), (0, 3, 2, 4)))
    cache.copier.copy(TierCopy(*TO_DISK, (3, 2), (2, 0)))
    cache.copier.copy(TierCopy(*TO_HOST, (0, 4), (3, 2)))
    cache.data.zero_()
    cache.copier.copy(TierCopy(*FROM_HOST, (0, 3, 4), (0, 2, 11)))
    cache.copier.copy(TierCopy(*FROM_DISK, (0, 2), (5, 4)))
    assert cache.blocks(0, 2, 11, 4, 5) == [before[index] for index in (5, 0, 11, 1, 2)]
    assert not any(any(block) for block in cache.blocks(1, 3))


def test_a_store_has_what_queued_kernels_write_and_runs_beside_later_ones(cache: Cache) -> None:
    from headrace_engine.torch_memory.stream_order import mark_compute

    cache.copier.copy(TierCopy(*TO_HOST, (0,), (0,)))
    keep_busy(cache.device.type)
    cache.data.fill_(7)
    mark = mark_compute(cache.device)
    keep_busy(cache.device.type)
    later = mark_compute(cache.device)
    cache.copier.copy(TierCopy(*TO_HOST, (3,), (1,)), mark)
    assert later.query() is (cache.device.type == "cpu")
    start_s = time.monotonic()
    while not later.query():
        assert time.monotonic() < start_s + 20.0
    cache.copier.copy(TierCopy(*FROM_HOST, (1,), (8,)))
    assert set(cache.blocks(8)[0]) == {7}


def test_a_load_overwrites_a_block_after_queued_kernels_have_read_it(cache: Cache) -> None:
    from headrace_engine.torch_memory.stream_order import mark_compute

    (stored,) = cache.blocks(3)
    cache.copier.copy(TierCopy(*TO_HOST, (3,), (1,)))
    cache.data.fill_(7)
    keep_busy(cache.device.type)
    read = cache.data.clone()
    cache.copier.copy(TierCopy(*FROM_HOST, (1,), (8,)), mark_compute(cache.device))
    assert set(read.cpu().numpy().tolist()) == {7}
    assert cache.blocks(8) == [stored]


def test_blocks_in_scattered_places_return_by_one_copy(cache: Cache) -> None:
    before = cache.blocks(*range(BLOCKS))
    host = (9, 2, 7, 0, 11, 4)
    cache.copier.copy(TierCopy(*TO_HOST, (1, 3, 5, 7, 9, 11), host))
    cache.data.zero_()
    cache.copier.copy(TierCopy(*FROM_HOST, host, (0, 2, 4, 6, 8, 10)))
    assert cache.blocks(0, 2, 4, 6, 8, 10) == [before[index] for index in (1, 3, 5, 7, 9, 11)]


def test_a_transport_sends_blocks_straight_from_main_memory(cache: Cache, tmp_path: Path) -> None:
    from headrace_engine.torch_memory.device_memory import register_host

    (stored,) = cache.blocks(5)
    cache.copier.copy(TierCopy(*TO_HOST, (5,), (2,)))
    cache.data.zero_()
    peer = Cache(str(cache.device), tmp_path)
    sender, receiver = (
        open_transport(KIND, "127.0.0.1", memory=one.memory) for one in (cache, peer)
    )
    host = cache.copier.host_memory
    register_host(sender, host.base_address, host.arena_bytes)
    receiver.register(peer.rank.base_address, peer.rank.arena_bytes)
    planner = CopyPlanner(host, peer.rank)
    span = BlockSpan(0, 16, np.array([2]), 0, np.array([7]), 0)
    for layer in range(6):
        sender.write(receiver.session, planner.plan(Edge(0, 0, 0, 0, 4), layer, span), 20.0)
    assert peer.blocks(7) == [stored]
    sender.close()
    receiver.close()
    peer.copier.close()


def test_main_memory_is_page_locked_while_the_copier_is_open(device: str, tmp_path: Path) -> None:
    import torch

    cache = Cache(device, tmp_path)
    area = torch.from_numpy(cache.copier._host.bytes)
    assert area.is_pinned() is (device != "cpu")
    cache.copier.close()
    assert not area.is_pinned()
