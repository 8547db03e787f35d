"""Gives requests neighbouring blocks in order. Replaces a method of vLLM's block pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


def sort_new_blocks(kv_cache_manager: KVCacheManager) -> None:
    """Gives requests their new blocks in ascending order, so that a transfer copies neighbouring blocks as one.

    vLLM frees a request's last block first, and would hand the same blocks out in descending order. Which blocks are
    handed out, and evicted from the prefix cache, does not change.
    """
    pool = kv_cache_manager.block_pool
    take = pool.get_new_blocks

    def get_new_blocks(num_blocks: int) -> list[KVCacheBlock]:
        return sorted(take(num_blocks), key=lambda block: block.block_id)

    pool.get_new_blocks = get_new_blocks
