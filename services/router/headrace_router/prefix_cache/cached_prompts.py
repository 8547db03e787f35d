"""How much of a prompt each worker has cached, from the indexes of all models. Pure.

It needs no connection: the directory feeds the indexes from the workers' events, and a simulation from its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Final

import numpy as np

from headrace_kv.layout.layout import WorkerRef
from headrace_kv.prefix.hashing import PromptHashes, TokenIds
from headrace_router.prefix_cache.model_index import ModelIndex
from headrace_router.prefix_cache.tier_prices import SLOWER_TIERS, TierPrices
from headrace_router.workers.table import LoadTable, Numbers

REMOTE_SHARE: Final = 0.25
"""Of a block in the remote pool."""
_HASHABLE: Final = (list, tuple, array, bytes, memoryview, np.ndarray)


class CachedPrompts:
    """One index for each model and block size, and the credit of their blocks. One event loop owns it.

    `prefix_hash_key` returns the deployment's key, or 0 while it is unknown. Without it no worker gets credit. Blocks
    in slower tiers count for less: see TierPrices. Every worker of a model reaches the blocks that any worker has
    announced in its remote pool.
    """

    def __init__(self, prefix_hash_key: Callable[[], int], prices: TierPrices) -> None:
        self._prefix_hash_key = prefix_hash_key
        self._prices = prices
        self._indexes: dict[str, dict[int, ModelIndex]] = {}

    def model_index(self, model: str, block_tokens: int) -> ModelIndex:
        """The index of a model with blocks of this size. Made on first use."""
        indexes = self._indexes.setdefault(model, {})
        if block_tokens not in indexes:
            indexes[block_tokens] = ModelIndex(model, block_tokens)
        return indexes[block_tokens]

    def keep(self, used: Set[tuple[str, int]]) -> None:
        """Drops the indexes of all other models and block sizes."""
        self._indexes = {
            model: kept
            for model, indexes in self._indexes.items()
            if (kept := {size: index for size, index in indexes.items() if (model, size) in used})
        }

    def all(self) -> list[ModelIndex]:
        """Every index."""
        return [index for sizes in self._indexes.values() for index in sizes.values()]

    def cached_tokens(
        self, table: LoadTable, token_ids: TokenIds | Sequence[int], cache_salt: str
    ) -> Numbers:
        """The cached tokens of a prompt with this salt for each worker of the table. Shape [worker]."""
        found: Numbers = np.zeros(len(table))
        if not table.workers:
            return found
        model = table.workers[0].model
        for model_index, prompt in self._prompts(model, token_ids, cache_salt):
            known = model_index.table_slots(table)
            if not len(known.rows):
                continue
            block_tokens = model_index.block_tokens
            *own, pooled = model_index.blocks(prompt)
            tiers = [blocks[known.slots] for blocks in own]
            blocks = reached = tiers[0]
            if any(np.any(one) for one in own[1:]):
                shares = self._prices.shares(model, block_tokens, table)
                blocks = _credited_blocks(tiers, [share[known.rows] for share in shares])
                reached = np.maximum.reduce(tiers)
            if np.any(pooled):
                blocks = blocks + REMOTE_SHARE * np.maximum(pooled.max() - reached, 0.0)
            found[known.rows] = blocks * block_tokens
        return found

    def cached_refs(
        self,
        model: str,
        token_ids: TokenIds | Sequence[int],
        cache_salt: str,
        refs: Collection[WorkerRef],
    ) -> dict[WorkerRef, int]:
        """The same for some workers of a model, in either role. Workers without any are left out.

        The remote pool does not count: all of them reach it.
        """
        found: dict[WorkerRef, int] = {}
        for model_index, prompt in self._prompts(model, token_ids, cache_salt):
            index, block_tokens = model_index.index, model_index.block_tokens
            slots = model_index.slots_of(refs)
            *own, _ = model_index.blocks(prompt)
            if any(np.any(one) for one in own[1:]):
                slots = slots[np.maximum.reduce(own)[slots] > 0]
                shares = [
                    self._prices.shares_of(model, block_tokens, ref) for ref in index.refs(slots)
                ]
                # Perhaps only other workers have blocks.
                by_tier = np.reshape(shares, (len(slots), len(SLOWER_TIERS))).T
                blocks = _credited_blocks([one[slots] for one in own], list(by_tier))
            else:
                blocks = own[0][slots]
            found |= index.by_worker(slots, blocks * block_tokens)
        return found

    def _prompts(
        self, model: str, token_ids: TokenIds | Sequence[int], cache_salt: str
    ) -> Iterable[tuple[ModelIndex, PromptHashes]]:
        key = self._prefix_hash_key()
        indexes = self._indexes.get(model)
        if not key or not indexes:
            return
        if not isinstance(token_ids, _HASHABLE):
            token_ids = list(token_ids)
        for model_index in indexes.values():
            yield model_index, model_index.prompt(key, token_ids, cache_salt)


def _credited_blocks(tiers: Sequence[Numbers], shares: Sequence[Numbers | float]) -> Numbers:
    """Converts the blocks of each tier to blocks of the fastest. A tier contains the blocks of faster ones."""
    total = reached = tiers[0]
    for share, blocks in zip(shares, tiers[1:], strict=True):
        deeper = np.maximum(reached, blocks)
        total = total + share * (deeper - reached)
        reached = deeper
    return total
