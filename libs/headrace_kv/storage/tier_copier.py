"""Makes the copies between one rank's tiers. Planned by the same planner as transfers to other workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from headrace_common.errors import InternalError, TransferFailed
from headrace_kv.layout.layout import KvLayout, RankMemory
from headrace_kv.manager.lower_tiers import TierCopy
from headrace_kv.plan.copy_plan import BlockSpan, CopyPlanner
from headrace_kv.plan.runs import Runs, interleave
from headrace_kv.plan.shard_map import Edge, heads_held
from headrace_kv.pool.memory import PoolMemory
from headrace_kv.prefix.events import Tier
from headrace_kv.storage.device_copies import DeviceCopies, DeviceMemory
from headrace_kv.storage.disk import DiskStorage
from headrace_kv.storage.host import HostStorage, block_bytes_of
from headrace_kv.transport.device_mark import PASSED, Mark
from headrace_kv.transport.packing import copy_runs

# Blocks that are read from disk before they are copied on together.
_BOUNCE_BLOCKS_MAX: Final = 16
_BOUNCE_BYTES_MAX: Final = 32 << 20


class TierCopier:
    """The tiers of one rank. Blocks on disk pass through main memory. One thread calls it.

    `device` is KV memory, which this process reads and writes by address, or through `device_memory`. With `pooled`, a
    remote pool moves blocks to and from `pool_memory`, where slot i is block i of the tier HOST. Raises ConfigError as
    HostStorage, DiskStorage and DeviceMemory.lock_pages do.
    """

    def __init__(
        self,
        layout: KvLayout,
        device: RankMemory,
        *,
        host_blocks: int,
        disk_blocks: int = 0,
        disk_folder: Path = Path("/var/tmp"),
        pooled: bool = False,
        device_memory: DeviceMemory | None = None,
    ) -> None:
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
        self._device = (
            None if device_memory is None else DeviceCopies(device_memory, self._host.bytes)
        )
        self._disk = (
            DiskStorage(disk_folder, self._host.block_bytes, disk_blocks) if disk_blocks else None
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in main memory and on disk."""
        return self._host.block_bytes

    @property
    def host_memory(self) -> RankMemory:
        """The blocks in main memory, with the same layout as KV memory."""
        return self._host.memory

    @property
    def pool_memory(self) -> PoolMemory:
        """The blocks in main memory. Raises InternalError without `pooled`."""
        if self._host.pool_memory is None:
            raise InternalError("the blocks in main memory are not shared with a remote pool")
        return self._host.pool_memory

    @property
    def host_is_lost(self) -> bool:
        """Whether blocks in main memory may have other bytes than were copied, because a device has failed."""
        return self._device is not None and self._device.failed

    def copy(self, copy: TierCopy, mark: Mark = PASSED) -> None:
        """Makes a copy when the device has passed the mark. Raises TransferFailed when the disk or the device fails.

        Then some of the blocks are not copied.
        """
        if self.host_is_lost:
            raise TransferFailed("an earlier copy from or to the device has failed")
        kinds = (copy.source, copy.destination)
        if kinds == (Tier.DEVICE, Tier.HOST):
            runs = self._plan_blocks(copy.source_ids, copy.destination_ids)
            if self._device is None:
                copy_runs(runs)
            else:
                self._device.to_host(runs, mark)
        elif kinds == (Tier.HOST, Tier.DEVICE):
            self._load(copy.source_ids, copy.destination_ids, mark)
        elif kinds == (Tier.HOST, Tier.DISK):
            for source, destination in zip(copy.source_ids, copy.destination_ids, strict=True):
                self._disk_storage().write(destination, self._host.block(source))
        elif kinds == (Tier.DISK, Tier.DEVICE):
            for start in range(0, len(copy.source_ids), len(self._bounce)):
                end = start + len(self._bounce)
                self._load_disk(copy.source_ids[start:end], copy.destination_ids[start:end], mark)
        else:
            raise InternalError(f"no copy from {copy.source.name} to {copy.destination.name}")

    def close(self) -> None:
        """Frees the file. Main memory is freed with this object."""
        if self._device is not None:
            self._device.close()
        self._host.close()
        if self._disk is not None:
            self._disk.close()

    def _load(self, host_ids: Sequence[int], device_ids: Sequence[int], mark: Mark) -> None:
        runs = self._plan_blocks(device_ids, host_ids).reverse()
        if self._device is None:
            copy_runs(runs)
        else:
            self._device.to_device(runs, mark)

    def _load_disk(
        self, source_ids: Sequence[int], destination_ids: Sequence[int], mark: Mark
    ) -> None:
        bounce = self._bounce[: len(source_ids)]
        for source, between in zip(source_ids, bounce, strict=True):
            self._disk_storage().read(source, self._host.block(between))
        self._load(bounce, destination_ids, mark)

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
        # Layers mostly have equal distances, and blocks have not.
        return interleave([self._planner.plan(self._edge, layer, span) for layer in self._layers])

    def _disk_storage(self) -> DiskStorage:
        if self._disk is None:
            raise InternalError("this rank has no blocks on disk")
        return self._disk
