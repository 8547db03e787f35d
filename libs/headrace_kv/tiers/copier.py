"""Makes the copies between one rank's tiers. Planned by the same planner as transfers to other workers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from xxhash import xxh3_64_intdigest

from headrace_common.errors import ConfigError, InternalError, TransferFailed
from headrace_kv.copy_plan import BlockSpan, CopyPlanner
from headrace_kv.layout import TOKENS, KvLayout, RankMemory
from headrace_kv.prefix.events import Tier
from headrace_kv.runs import Runs, concatenate
from headrace_kv.shard_map import WHOLE_BLOCKS, Edge, PlacedRegions, heads_held, place_regions
from headrace_kv.tiers.pool_process import SEAL_BYTES, PoolMemory, SharedArena
from headrace_kv.tiers.tiers import TierCopy
from headrace_kv.transport.memory import (
    PAGE_BYTES,
    PASSED,
    Bytes,
    Mark,
    Piece,
    allocate_arena,
    bytes_at,
    gather,
    require_available,
    scatter,
    suited_alignment_bytes,
)


def block_bytes_of(layout: KvLayout, rank: int, *, pooled: bool = False) -> int:
    """Bytes of a block of one rank with all its layers, up to the next page. Raises as HostStorage does."""
    content_bytes = _place_block(layout, rank).arena_bytes
    return _rounded(_sealed_bytes(content_bytes) if pooled else content_bytes, PAGE_BYTES)


class HostStorage:
    """`block_count` blocks of one rank, with all its layers.

    Each block starts at a page, so that files can be read into it and written from it without another copy. With
    `pooled`, the memory is shared with a process of the remote pool, and each block has room for the pool's seal.
    `bytes` are all blocks, of shape [block_bytes * block_count].
    Raises ConfigError for a layout with several groups, and for more memory than is available.
    """

    def __init__(
        self, layout: KvLayout, rank: int, block_count: int, *, pooled: bool = False
    ) -> None:
        one = _place_block(layout, rank)
        self.block_bytes = block_bytes_of(layout, rank, pooled=pooled)
        nbytes = self.block_bytes * block_count
        self._shared = SharedArena(nbytes) if pooled else None
        self.pool_memory = None
        """The memory for a remote pool; None without `pooled`."""
        if self._shared is None:
            require_available(nbytes, "kv_host_gib")
            self.bytes = allocate_arena(nbytes, suited_alignment_bytes(nbytes))
        else:
            self.bytes = self._shared.bytes
            self.pool_memory = PoolMemory(
                self._shared.descriptor,
                self.block_bytes,
                block_count,
                _sealed_bytes(one.arena_bytes),
            )
        # Memory gets its pages here, and not beside a forward pass. Padding is written to disk too. It must not be what
        # this process had in that memory.
        self.bytes[:] = 0
        self.memory = RankMemory(
            rank=rank,
            transport="",
            session="",
            base_address=int(self.bytes.ctypes.data),
            arena_bytes=nbytes,
            regions=tuple(
                replace(region, block_count=block_count, block_stride_bytes=self.block_bytes)
                for region in one.regions
            ),
        )

    def block(self, block: int) -> Bytes:
        """The bytes of a block, of shape [block_bytes], not a copy."""
        start = block * self.block_bytes
        return self.bytes[start : start + self.block_bytes]

    def close(self) -> None:
        """Ends the sharing. The memory is freed with this object."""
        if self._shared is not None:
            self._shared.close()


def _sealed_bytes(content_bytes: int) -> int:
    return _rounded(content_bytes, SEAL_BYTES) + SEAL_BYTES


def _rounded(nbytes: int, unit_bytes: int) -> int:
    return -(-nbytes // unit_bytes) * unit_bytes


def _place_block(layout: KvLayout, rank: int) -> PlacedRegions:
    """Raises ConfigError for a layout with several groups."""
    if len(layout.groups) != 1 or layout.groups[0].kind != TOKENS:
        raise ConfigError(
            "only KV of attention layers that are all alike can be kept in main memory or on disk",
            metadata={"field": "host_blocks"},
        )
    return place_regions(layout, rank, (1,), WHOLE_BLOCKS)


class DeviceMemory(Protocol):
    """Copies between KV memory and main memory. One thread calls it."""

    def lock_pages(self, area: Bytes) -> None:
        """Lets the device copy from and to host memory at once. Raises ConfigError when it cannot."""

    def unlock_pages(self, area: Bytes) -> None:
        """Ends `lock_pages`. Precedes the end of the host memory."""

    def to_host(self, pieces: Iterable[Piece], mark: Mark) -> None:
        """Copies what the device writes before the mark. Returns when the pieces' host memory has the bytes.

        Raises TransferFailed.
        """

    def to_device(self, pieces: Iterable[Piece], mark: Mark) -> None:
        """Overwrites what the device reads before the mark. Returns when that is done. Raises TransferFailed."""


class AddressedMemory:
    """KV memory that this process reads and writes by address."""

    def lock_pages(self, area: Bytes) -> None:
        """Nothing needs it."""

    def unlock_pages(self, area: Bytes) -> None:
        """See lock_pages."""

    def to_host(self, pieces: Iterable[Piece], mark: Mark) -> None:
        for piece in pieces:
            gather(piece.addresses, piece.lengths, piece.area)

    def to_device(self, pieces: Iterable[Piece], mark: Mark) -> None:
        for piece in pieces:
            scatter(piece.area, piece.addresses, piece.lengths)


ADDRESSED_MEMORY: Final = AddressedMemory()


def _pieces(runs: Runs) -> Iterator[Piece]:
    """Pieces of the source, which is main memory: runs that lie side by side there are one."""
    order = np.argsort(runs.source_addresses)
    sources, lengths = runs.source_addresses[order], runs.lengths[order]
    destinations = runs.destination_addresses[order]
    breaks = np.flatnonzero(sources[1:] != sources[:-1] + lengths[:-1]) + 1
    for piece in np.split(np.arange(len(runs)), breaks):
        area = bytes_at(int(sources[piece[0]]), int(lengths[piece].sum()))
        yield Piece(destinations[piece], lengths[piece], area)


class DiskStorage:
    """`block_count` blocks of `block_bytes` bytes each, in a file without a name: it ends with this process.

    Raises ConfigError when the file cannot have its size in that folder. One thread calls it.
    """

    def __init__(self, folder: Path, block_bytes: int, block_count: int) -> None:
        self._block_bytes = block_bytes
        self._checksums: dict[int, int] = {}
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, block_bytes * block_count)
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            size_gib = block_bytes * block_count / 2**30
            raise ConfigError(
                f"no file of {size_gib:.1f} GiB can be made in {folder}: {error.strerror}; make room there, name "
                "another folder, or take fewer blocks",
                metadata={"field": "disk_folder", "value": str(folder)},
            ) from error

    def write(self, block: int, content: Bytes) -> None:
        """Replaces a block. Raises TransferFailed; the block then has no content."""
        self._checksums.pop(block, None)
        with _failures(f"writing block {block}"):
            done = os.pwrite(self._descriptor, content.data, block * self._block_bytes)
            if done != self._block_bytes:
                raise TransferFailed(f"{done} of {self._block_bytes} bytes reached the disk")
        self._checksums[block] = xxh3_64_intdigest(content.data)

    def read(self, block: int, target: Bytes) -> None:
        """Reads a block. Raises TransferFailed when it has no content, or other content than was written."""
        checksum = self._checksums.get(block)
        if checksum is None:
            raise TransferFailed(f"block {block} was not written to the disk")
        with _failures(f"reading block {block}"):
            done = os.preadv(self._descriptor, [target.data], block * self._block_bytes)
        if done != self._block_bytes or xxh3_64_intdigest(target.data) != checksum:
            raise TransferFailed(f"block {block} has other bytes on the disk than were written")

    def close(self) -> None:
        """Frees the space."""
        os.close(self._descriptor)
        # Another file may get the number.
        self._descriptor = -1


@contextmanager
def _failures(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TransferFailed(f"{what} on the disk failed: {error.strerror}") from error


# Blocks that are read from disk before they are copied on together.
_BOUNCE_BLOCKS_MAX: Final = 16
_BOUNCE_BYTES_MAX: Final = 32 << 20


class TierCopier:
    """The tiers of one rank, of `block_counts`. Blocks on disk pass through main memory. One thread calls it.

    `device` is KV memory, which this process reads and writes through `device_memory`. With `pooled`, a
    remote pool moves blocks to and from `pool_memory`, where slot i is block i of the tier HOST. Raises ConfigError as
    HostStorage, DiskStorage and DeviceMemory.lock_pages do.
    """

    def __init__(
        self,
        layout: KvLayout,
        device: RankMemory,
        block_counts: Mapping[Tier, int],
        disk_folder: str = "/var/tmp",
        *,
        pooled: bool = False,
        device_memory: DeviceMemory = ADDRESSED_MEMORY,
    ) -> None:
        host_blocks, disk_blocks = block_counts[Tier.HOST], block_counts.get(Tier.DISK, 0)
        self._layers = [
            layer for layer in layout.groups[0].layers if layer in layout.layers_of(device.rank)
        ]
        self._block_tokens = layout.groups[0].block_tokens
        bounce_count = _BOUNCE_BYTES_MAX // block_bytes_of(layout, device.rank, pooled=pooled)
        bounce_count = max(1, min(bounce_count, disk_blocks, _BOUNCE_BLOCKS_MAX))
        self._bounce = range(host_blocks, host_blocks + bounce_count)
        self._host = HostStorage(layout, device.rank, host_blocks + bounce_count, pooled=pooled)
        heads = heads_held(
            device.rank % layout.tensor_parallel_size,
            layout.tensor_parallel_size,
            layout.groups[0].head_count,
        )
        self._edge = Edge(device.rank, device.rank, 0, 0, len(heads))
        self._planner = CopyPlanner(device, self._host.memory)
        self._device = device_memory
        self._device.lock_pages(self._host.bytes)
        self._disk = (
            DiskStorage(Path(disk_folder), self._host.block_bytes, disk_blocks)
            if disk_blocks
            else None
        )
        self.block_bytes = self._host.block_bytes
        """Bytes of a block in main memory and on disk."""
        self.host_memory = self._host.memory
        """The blocks in main memory, with the same layout as KV memory."""
        self.host_is_lost = False
        """Whether blocks in main memory may have other bytes than were copied, because a device has failed.

        It may still write there. So no copy follows.
        """

    @property
    def pool_memory(self) -> PoolMemory:
        """The blocks in main memory. Raises InternalError without `pooled`."""
        if self._host.pool_memory is None:
            raise InternalError("the blocks in main memory are not shared with a remote pool")
        return self._host.pool_memory

    def copy(self, copy: TierCopy, mark: Mark = PASSED) -> None:
        """Makes a copy when the device has passed the mark. Raises TransferFailed when the disk or the device fails.

        Then some of the blocks are not copied.
        """
        if self.host_is_lost:
            raise TransferFailed("an earlier copy from or to the device has failed")
        kinds = (copy.source, copy.destination)
        if kinds == (Tier.DEVICE, Tier.HOST):
            self._move(copy.source_ids, copy.destination_ids, mark)
        elif kinds == (Tier.HOST, Tier.DEVICE):
            self._move(copy.destination_ids, copy.source_ids, mark, loads=True)
        elif kinds == (Tier.HOST, Tier.DISK) and self._disk is not None:
            for source, destination in zip(copy.source_ids, copy.destination_ids, strict=True):
                self._disk.write(destination, self._host.block(source))
        elif kinds == (Tier.DISK, Tier.DEVICE) and self._disk is not None:
            for start in range(0, len(copy.source_ids), len(self._bounce)):
                sources = copy.source_ids[start : start + len(self._bounce)]
                bounce = self._bounce[: len(sources)]
                for source, between in zip(sources, bounce, strict=True):
                    self._disk.read(source, self._host.block(between))
                targets = copy.destination_ids[start : start + len(sources)]
                self._move(targets, bounce, mark, loads=True)
        else:
            raise InternalError(f"no copy from {copy.source.name} to {copy.destination.name}")

    def close(self) -> None:
        """Frees the file. Main memory is freed with this object."""
        self._device.unlock_pages(self._host.bytes)
        self._host.close()
        if self._disk is not None:
            self._disk.close()

    def _move(
        self, device_ids: Sequence[int], host_ids: Sequence[int], mark: Mark, *, loads: bool = False
    ) -> None:
        """Copies from KV memory to main memory, or back when it `loads`."""
        runs = self._plan_blocks(device_ids, host_ids)
        move = self._device.to_device if loads else self._device.to_host
        self.host_is_lost = True
        move(_pieces(runs.reverse()), mark)
        self.host_is_lost = False

    def _plan_blocks(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> Runs:
        """Runs from KV memory to main memory."""
        span = BlockSpan(
            0,
            len(device_ids) * self._block_tokens,
            np.asarray(device_ids, np.int64),
            0,
            np.asarray(host_ids, np.int64),
            0,
        )
        return concatenate([self._planner.plan(self._edge, layer, span) for layer in self._layers])
