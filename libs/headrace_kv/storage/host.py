"""Blocks of KV in this process's main memory, each in one piece."""

from __future__ import annotations

from dataclasses import replace

from headrace_common.errors import ConfigError
from headrace_kv.layout import TOKENS, KvLayout, RankMemory
from headrace_kv.pool.memory import SEAL_BYTES, PoolMemory, SharedArena
from headrace_kv.shard_map import WHOLE_BLOCKS, PlacedRegions, place_regions
from headrace_kv.transport.memory import (
    PAGE_BYTES,
    Bytes,
    allocate_arena,
    require_available,
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
            self._arena = allocate_arena(nbytes, suited_alignment_bytes(nbytes))
        else:
            self._arena = self._shared.bytes
            self.pool_memory = PoolMemory(
                self._shared.descriptor,
                self.block_bytes,
                block_count,
                _sealed_bytes(one.arena_bytes),
            )
        # Memory gets its pages here, and not beside a forward pass. Padding is written to disk too. It must not be what
        # this process had in that memory.
        self._arena[:] = 0
        self.memory = RankMemory(
            rank=rank,
            transport="",
            session="",
            base_address=int(self._arena.ctypes.data),
            arena_bytes=nbytes,
            regions=tuple(
                replace(region, block_count=block_count, block_stride_bytes=self.block_bytes)
                for region in one.regions
            ),
        )

    def block(self, block: int) -> Bytes:
        """The bytes of a block, of shape [block_bytes], not a copy."""
        start = block * self.block_bytes
        return self._arena[start : start + self.block_bytes]

    @property
    def bytes(self) -> Bytes:
        """All blocks, of shape [block_bytes * block_count], not a copy."""
        return self._arena

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
