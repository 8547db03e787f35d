"""Copies of one rank's blocks between KV memory, main memory and a disk."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.layout import KvLayout, RankMemory
from headrace_kv.prefix.events import Tier
from headrace_kv.shard_map import HEAD_OUTER, TOKENS_OUTER, Dimension, place_regions
from headrace_kv.tiers.copier import (
    ADDRESSED_MEMORY,
    AddressedMemory,
    DeviceMemory,
    DiskStorage,
    TierCopier,
)
from headrace_kv.tiers.tiers import TierCopy
from headrace_kv.transport.memory import Bytes, Mark, Piece, wait_for

BLOCKS = 6
LAYERS = 3
TO_HOST, TO_DISK = (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DISK)
FROM_HOST, FROM_DISK = (Tier.HOST, Tier.DEVICE), (Tier.DISK, Tier.DEVICE)


@dataclass(slots=True)
class Rank:
    """KV memory full of random bytes, and its copier."""

    arena: Bytes
    memory: RankMemory
    copier: TierCopier

    def blocks(self, *block_ids: int) -> list[bytes]:
        """The bytes of each block, in every region."""
        return [b"".join(self.units(block)) for block in block_ids]

    def units(self, block: int) -> Iterator[bytes]:
        for region in self.memory.regions:
            for head in range(region.head_count):
                for token in range(region.block_tokens if region.token_addressable else 1):
                    start = (
                        region.offset_bytes
                        + block * region.block_stride_bytes
                        + head * region.head_stride_bytes
                        + token * region.token_stride_bytes
                    )
                    yield self.arena[start : start + region.unit_bytes].tobytes()


class Device(AddressedMemory):
    """Memory of this process that stands for a device's. It can fail."""

    def __init__(self) -> None:
        self.locked: list[Bytes] = []
        self.fails = False
        self.wait_s = 20.0

    def lock_pages(self, area: Bytes) -> None:
        self.locked.append(area)

    def unlock_pages(self, area: Bytes) -> None:
        self.locked.pop(next(at for at, one in enumerate(self.locked) if one is area))

    def to_host(self, pieces: Iterable[Piece], mark: Mark) -> None:
        self._begin(mark)
        super().to_host(pieces, mark)

    def to_device(self, pieces: Iterable[Piece], mark: Mark) -> None:
        self._begin(mark)
        super().to_device(pieces, mark)

    def _begin(self, mark: Mark) -> None:
        if not wait_for(mark, self.wait_s):
            raise TransferFailed("the device did not compute")
        if self.fails:
            raise TransferFailed("the device has stopped copying")


class Marked:
    """A mark that is passed after some queries, or fails."""

    def __init__(self, queries: int, failure: str = "") -> None:
        self.left = queries
        self._failure = failure

    def query(self) -> bool:
        if self._failure:
            raise RuntimeError(self._failure)
        self.left -= 1
        return self.left < 0


def layout_of(block_format: str = "token_outer", tensor_parallel_size: int = 1) -> KvLayout:
    return KvLayout.attention(
        model="m",
        dtype="float16",
        layer_count=LAYERS,
        kv_head_count=4,
        block_tokens=4,
        parts={"k": 24, "v": 40},
        tensor_parallel_size=tensor_parallel_size,
        block_format=block_format,
    )


@pytest.fixture
def copiers() -> Iterator[list[TierCopier]]:
    opened: list[TierCopier] = []
    yield opened
    for copier in opened:
        copier.close()


def rank_of(
    copiers: list[TierCopier],
    folder: Path,
    layout: KvLayout | None = None,
    rank: int = 0,
    order: tuple[Dimension, ...] = HEAD_OUTER,
    device: DeviceMemory = ADDRESSED_MEMORY,
) -> Rank:
    layout = layout or layout_of()
    placed = place_regions(layout, rank, (BLOCKS,), order)
    arena = np.frombuffer(random.Random(1).randbytes(placed.arena_bytes), np.uint8).copy()
    memory = RankMemory(rank, "", "", int(arena.ctypes.data), arena.nbytes, placed.regions)
    copier = TierCopier(
        layout,
        memory,
        {Tier.HOST: 4, Tier.DISK: 3},
        str(folder),
        device_memory=device,
    )
    copiers.append(copier)
    return Rank(arena, memory, copier)


@pytest.mark.parametrize("order", [HEAD_OUTER, TOKENS_OUTER])
@pytest.mark.parametrize("block_format", ["token_outer", "token_inner"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("device", [ADDRESSED_MEMORY, Device()])
def test_blocks_return_with_their_bytes_from_every_tier(
    copiers: list[TierCopier],
    tmp_path: Path,
    order: tuple[Dimension, ...],
    block_format: str,
    rank: int,
    device: DeviceMemory,
) -> None:
    one = rank_of(copiers, tmp_path, layout_of(block_format, 2), rank, order, device)
    before = one.blocks(*range(BLOCKS))
    one.copier.copy(TierCopy(*TO_HOST, (5, 1, 2), (0, 3, 2)))
    one.copier.copy(TierCopy(*TO_DISK, (3, 2), (2, 0)))
    # The places in main memory get other content.
    one.copier.copy(TierCopy(*TO_HOST, (0, 4), (3, 2)))
    one.arena[:] = 0
    one.copier.copy(TierCopy(*FROM_HOST, (0, 3), (0, 2)))
    one.copier.copy(TierCopy(*FROM_DISK, (0, 2), (5, 4)))
    assert one.blocks(0, 2, 4, 5) == [before[index] for index in (5, 0, 1, 2)]
    assert not any(any(block) for block in one.blocks(1, 3))


def test_a_device_copies_what_it_wrote_before_the_mark(
    copiers: list[TierCopier], tmp_path: Path
) -> None:
    one = rank_of(copiers, tmp_path, device=Device())
    before = one.blocks(*range(BLOCKS))
    for copy in (TierCopy(*TO_HOST, (5,), (0,)), TierCopy(*FROM_HOST, (0,), (3,))):
        mark = Marked(3)
        one.copier.copy(copy, mark)
        assert mark.left == -1
    assert one.blocks(3) == [before[5]]


@pytest.mark.parametrize("fault", ["copy", "late", "lost"])
def test_after_a_failure_of_the_device_nothing_returns(
    copiers: list[TierCopier], tmp_path: Path, fault: str
) -> None:
    device = Device()
    one = rank_of(copiers, tmp_path, device=device)
    one.copier.copy(TierCopy(*TO_HOST, (5, 1), (0, 1)))
    one.copier.copy(TierCopy(*TO_DISK, (0,), (2,)))
    lost_before = one.copier.host_is_lost
    device.fails = fault == "copy"
    device.wait_s = 0.01 if fault == "late" else 20.0
    mark = {"copy": Marked(0), "late": Marked(1 << 40), "lost": Marked(0, "launch failure")}[fault]
    reason = {"copy": "stopped", "late": "did not compute", "lost": "launch failure"}[fault]
    with pytest.raises(TransferFailed, match=reason):
        one.copier.copy(TierCopy(*TO_HOST, (2,), (1,)), mark)
    device.fails = False
    assert (lost_before, one.copier.host_is_lost) == (False, True)
    kinds = (TO_HOST, TO_DISK, FROM_HOST, FROM_DISK)
    for copy in (TierCopy(*kind, (2,), (1,)) for kind in kinds):
        with pytest.raises(TransferFailed, match="an earlier copy"):
            one.copier.copy(copy)


def test_a_disk_that_changes_bytes_is_detected(copiers: list[TierCopier], tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path, 4096, 2)
    content = np.arange(4096, dtype=np.uint32).astype(np.uint8)
    target = np.zeros(4096, np.uint8)
    storage.write(1, content)
    storage.read(1, target)
    assert (target == content).all()
    with pytest.raises(TransferFailed, match="not written"):
        storage.read(0, target)
    os.pwrite(storage._descriptor, b"\xff", 4096 + 17)
    with pytest.raises(TransferFailed, match="other bytes"):
        storage.read(1, target)
    storage.close()
    with pytest.raises(TransferFailed, match="Bad file descriptor"):
        storage.write(1, content)


def test_the_file_has_no_name_and_a_folder_without_room_is_named(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path, 4096, 2)
    assert list(tmp_path.iterdir()) == []
    storage.close()
    with pytest.raises(ConfigError, match="missing"):
        DiskStorage(tmp_path / "missing", 4096, 2)
    with pytest.raises(ConfigError, match="make room there"):
        DiskStorage(tmp_path, 1 << 40, 1 << 20)
