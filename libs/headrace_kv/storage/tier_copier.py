"""Makes the copies between one rank's tiers. Planned by the same planner as transfers to other workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from headrace_common.errors import InternalError
from headrace_kv.layout.layout import KvLayout, RankMemory
from headrace_kv.manager.lower_tiers import TierCopy
from headrace_kv.plan.copy_plan import BlockSpan, CopyPlanner
from headrace_kv.plan.runs import Runs, interleave
from headrace_kv.plan.shard_map import Edge, heads_held
from headrace_kv.pool.base import PoolMemory
from headrace_kv.prefix.events import Tier
from headrace_kv.storage.disk import DiskStorage
from headrace_kv.storage.host import HostStorage, block_bytes_of
from headrace_kv.transport.packing import copy_runs

# Blocks that are read from disk before they are copied on together.
_BOUNCE_BLOCKS_MAX: Final = 16
_BOUNCE_BYTES_MAX: Final = 32 << 20


class TierCopier:
    """The tiers of one rank. Blocks on disk pass through main memory. One thread calls it.

    `device` is KV memory that this process reads and writes by address. With `pooled`, a remote pool moves blocks to
    and from `pool_memory`, where slot i is block i of the tier HOST.
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

    def copy(self, copy: TierCopy) -> None:
        """Makes a copy. Raises TransferFailed when the disk fails. Then some of the blocks are not copied."""
        kinds = (copy.source, copy.destination)
        if kinds == (Tier.DEVICE, Tier.HOST):
            copy_runs(self._plan_blocks(copy.source_ids, copy.destination_ids))
        elif kinds == (Tier.HOST, Tier.DEVICE):
            copy_runs(self._plan_blocks(copy.destination_ids, copy.source_ids).reverse())
        elif kinds == (Tier.HOST, Tier.DISK):
            for source, destination in zip(copy.source_ids, copy.destination_ids, strict=True):
                self._disk_storage().write(destination, self._host.block(source))
        elif kinds == (Tier.DISK, Tier.DEVICE):
            for start in range(0, len(copy.source_ids), len(self._bounce)):
                end = start + len(self._bounce)
                self._load_disk(copy.source_ids[start:end], copy.destination_ids[start:end])
        else:
            raise InternalError(f"no copy from {copy.source.name} to {copy.destination.name}")

    def close(self) -> None:
        """Frees the file. Main memory is freed with this object."""
        self._host.close()
        if self._disk is not None:
            self._disk.close()

    def _load_disk(self, source_ids: Sequence[int], destination_ids: Sequence[int]) -> None:
        bounce = self._bounce[: len(source_ids)]
        for source, between in zip(source_ids, bounce, strict=True):
            self._disk_storage().read(source, self._host.block(between))
        copy_runs(self._plan_blocks(destination_ids, bounce).reverse())

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
