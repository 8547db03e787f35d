"""Keeps blocks from being reused beyond their request. Reaches into vLLM's block pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager


class BlockHolds:
    """Blocks that a transfer reads or may still write, under a name. The scheduling thread calls all methods.

    A held block has one reference more, as if another request shared it. So vLLM neither reuses nor evicts it, whatever
    becomes of its request.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._held: dict[str, tuple[int, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def bind(self, kv_cache_manager: KVCacheManager) -> None:
        """Sets the pool, once."""
        self._pool = kv_cache_manager.block_pool

    def hold(self, name: str, block_ids: Iterable[int]) -> None:
        """Holds blocks that a request holds now, until `release`."""
        assert self._pool is not None
        assert name not in self._held
        blocks = [block for one in block_ids if not (block := self._pool.blocks[one]).is_null]
        self._pool.touch(blocks)
        self._held[name] = tuple(block.block_id for block in blocks)

    def release(self, name: str) -> None:
        """Ignores unknown names."""
        held = self._held.pop(name, ())
        if held and self._pool is not None:
            # A request's last block is evicted first, as vLLM does it.
            self._pool.free_blocks(self._pool.blocks[one] for one in reversed(held))
