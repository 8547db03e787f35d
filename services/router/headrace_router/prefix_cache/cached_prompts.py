"""How much of a prompt each worker has cached, from the indexes of all models. Pure.

It needs no connection: the directory feeds the indexes from the workers' events, and a simulation from its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Final

import numpy as np

from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.hashing import PromptHashes, TokenIds
from headrace_router.prefix_cache.model_index import IndexedWorkers, ModelIndex
from headrace_router.prefix_cache.tier_prices import TierPrices
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
        model = table.workers[0].model if table.workers else ""
        for model_index, prompt in self._prompts(model, token_ids, cache_salt):
            workers = model_index.indexed(table)
            blocks, reached = self._own_blocks(model, model_index, prompt, workers)
            pooled = model_index.blocks(prompt)[-1]
            if np.any(pooled):
                blocks = blocks + REMOTE_SHARE * np.maximum(pooled.max() - reached, 0.0)
            found[workers.rows] = blocks * model_index.block_tokens
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
            workers = model_index.indexed(refs)
            blocks, _ = self._own_blocks(model, model_index, prompt, workers)
            holding = blocks.nonzero()[0].tolist()
            tokens = (blocks[holding] * model_index.block_tokens).astype(np.int64).tolist()
            found |= zip(map(workers.refs.__getitem__, holding), tokens, strict=True)
        return found

    def _own_blocks(
        self, model: str, model_index: ModelIndex, prompt: PromptHashes, workers: IndexedWorkers
    ) -> tuple[Numbers, Numbers]:
        """The blocks of each worker's own tiers, as blocks of the fastest, and how many there are. Shape [worker].

        A tier contains the blocks of faster ones.
        """
        *own, _ = model_index.blocks(prompt)
        device, *slower = (blocks[workers.slots] for blocks in own)
        reached = np.maximum.reduce([device, *slower])
        deeper = (reached > device).nonzero()[0]
        if len(deeper):
            refs = map(workers.refs.__getitem__, deeper.tolist())
            shares = self._prices.shares(model, model_index.block_tokens, refs)
            faster = device[deeper]
            for share, blocks in zip(shares, slower, strict=True):
                both = np.maximum(faster, blocks[deeper])
                device[deeper] += share * (both - faster)
                faster = both
        return device, reached

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
