"""How much of a prompt each worker has cached, from the indexes of all models. Pure.

It needs no connection: the directory feeds the indexes from the workers' events, and a simulation from its own.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.events import Tier
from headrace_kv.prefix.hashing import PrefixHasher, PromptHashes, TokenIds, prefix_hasher
from headrace_router.prefix_cache.index import PrefixIndex
from headrace_router.workers.table import LoadTable, Numbers

# Between two slices of a sweep, so that requests are served first.
_SWEEP_PAUSE_S: Final = 0.002
_TIERS: Final = tuple(Tier)


@dataclass(frozen=True, slots=True)
class IndexedWorkers:
    """Those workers of `given` that an index follows: `refs[i]` is at `rows[i]` of `given` and has slot `slots[i]`."""

    given: LoadTable | Collection[WorkerRef]
    generation: int
    refs: list[WorkerRef]
    rows: NDArray[np.intp]
    slots: NDArray[np.intp]


class ModelIndex:
    """The prefix index of one model, in blocks of one size."""

    def __init__(self, model: str, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.index = PrefixIndex()
        self._model = model
        self._hasher: PrefixHasher | None = None
        self._tokens: object = None
        self._cache_salt = ""
        self._prompt: PromptHashes | None = None
        self._blocks: list[Numbers] = []
        self._blocks_prompt: PromptHashes | None = None
        self._blocks_change_count = 0
        self._indexed: dict[type, IndexedWorkers] = {}

    def prompt(self, key: int, token_ids: TokenIds, cache_salt: str) -> PromptHashes:
        """The hashes of a prompt. Cached for an array, because a request looks up its prompt several times."""
        if self._prompt is None or self._tokens is not token_ids or self._cache_salt != cache_salt:
            hasher = self._hasher_of(key)
            prompt = hasher.lazy(token_ids, hasher.root_of(cache_salt))
            if not isinstance(token_ids, array):
                return prompt
            self._tokens, self._cache_salt, self._prompt = token_ids, cache_salt, prompt
        return self._prompt

    def indexed(self, given: LoadTable | Collection[WorkerRef]) -> IndexedWorkers:
        """Cached for a table, and for a frozenset, while no worker changes its slot."""
        known = self._indexed.get(type(given))
        if known is None or known.given is not given or known.generation != self.index.generation:
            known = self._find_slots(given)
            if isinstance(given, LoadTable | frozenset):
                self._indexed[type(given)] = known
        return known

    def blocks(self, prompt: PromptHashes) -> list[Numbers]:
        """By tier, fastest first, how many blocks of the prompt each worker holds. Shape [slot]. Empty for none at all.

        Cached while the index is unchanged: a request looks up its decode workers, then its prefill workers.
        """
        change_count = self.index.change_count
        if self._blocks_prompt is not prompt or self._blocks_change_count != change_count:
            found = [self.index.find(prompt, tier) for tier in _TIERS]
            self._blocks = found if any(map(np.any, found)) else []
            self._blocks_prompt, self._blocks_change_count = prompt, change_count
        return self._blocks

    async def sweep(self) -> None:
        """Clears the blocks of workers that have left, in small slices."""
        more = True
        while more:
            more = self.index.sweep()
            await asyncio.sleep(_SWEEP_PAUSE_S if more else 0)

    def _hasher_of(self, key: int) -> PrefixHasher:
        # The key never changes once it is known.
        if self._hasher is None:
            self._hasher = prefix_hasher(key, self._model, self.block_tokens)
        return self._hasher

    def _find_slots(self, given: LoadTable | Collection[WorkerRef]) -> IndexedWorkers:
        refs = [one.ref for one in given.workers] if isinstance(given, LoadTable) else list(given)
        slots = [self.index.slot(ref) for ref in refs]
        rows = [row for row, slot in enumerate(slots) if slot is not None]
        return IndexedWorkers(
            given=given,
            generation=self.index.generation,
            refs=[refs[row] for row in rows],
            rows=np.array(rows, np.intp),
            slots=np.array([slots[row] for row in rows], np.intp),
        )


UNMEASURED_SHARES: Final = {Tier.HOST: 0.75, Tier.DISK: 0.25}
"""Of the slower tiers, while a load or a computed token was not measured."""


class TierPrices:
    """The load times that workers have measured, against the time of computing.

    `compute_s_per_token` returns the seconds in which a prefill worker computes a token of a model; 0 before the first.
    """

    def __init__(self, compute_s_per_token: Callable[[str], float]) -> None:
        self._compute_s_per_token = compute_s_per_token
        self._load_s: dict[WorkerRef, dict[Tier, float]] = {}

    def measured(self, ref: WorkerRef, tier: Tier, load_s: float) -> None:
        """A worker loads a block of a tier in `load_s`."""
        self._load_s.setdefault(ref, {})[tier] = load_s

    def remove(self, ref: WorkerRef) -> None:
        """Forgets a worker."""
        self._load_s.pop(ref, None)

    def shares(self, model: str, block_tokens: int, refs: Iterable[WorkerRef]) -> Numbers:
        """The share of computing a block that loading it saves. Shape [slower tier, worker].

        0 when loading takes longer.
        """
        compute_s = block_tokens * self._compute_s_per_token(model)
        measured = [self._load_s.get(ref, {}) if compute_s > 0 else {} for ref in refs]
        return np.array(
            [
                [
                    max(0.0, 1.0 - times[tier] / compute_s) if tier in times else unmeasured
                    for times in measured
                ]
                for tier, unmeasured in UNMEASURED_SHARES.items()
            ]
        )


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
        self,
        table: LoadTable,
        token_ids: TokenIds | Sequence[int],
        cache_salt: str,
        *,
        pooled: bool = True,
    ) -> Numbers:
        """The cached tokens of a prompt with this salt for each worker of the table. Shape [worker].

        `pooled`: whether what the remote pool has counts, which all of them reach.
        """
        found: Numbers = np.zeros(len(table.workers))
        model = table.workers[0].model if table.workers else ""
        for model_index, held in self._held(model, token_ids, cache_salt):
            workers = model_index.indexed(table)
            blocks, reached = self._own_blocks(model, model_index, held, workers)
            if pooled and np.any(held[-1]):
                blocks = blocks + REMOTE_SHARE * np.maximum(held[-1].max() - reached, 0.0)
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
        for model_index, held in self._held(model, token_ids, cache_salt):
            workers = model_index.indexed(refs)
            blocks, _ = self._own_blocks(model, model_index, held, workers)
            holding = blocks.nonzero()[0].tolist()
            tokens = (blocks[holding] * model_index.block_tokens).astype(np.int64).tolist()
            found |= zip(map(workers.refs.__getitem__, holding), tokens, strict=True)
        return found

    def _own_blocks(
        self, model: str, model_index: ModelIndex, held: list[Numbers], workers: IndexedWorkers
    ) -> tuple[Numbers, Numbers]:
        """The blocks of each worker's own tiers, as blocks of the fastest, and how many there are. Shape [worker].

        A tier contains the blocks of faster ones.
        """
        *own, _ = held
        device, *slower = (blocks[workers.slots] for blocks in own)
        reached = device
        for blocks in slower:
            reached = np.maximum(reached, blocks)
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

    def _held(
        self, model: str, token_ids: TokenIds | Sequence[int], cache_salt: str
    ) -> Iterable[tuple[ModelIndex, list[Numbers]]]:
        """The indexes in which a worker holds blocks of the prompt."""
        key = self._prefix_hash_key()
        indexes = self._indexes.get(model)
        if not key or not indexes:
            return
        if not isinstance(token_ids, _HASHABLE):
            token_ids = list(token_ids)
        for model_index in indexes.values():
            if held := model_index.blocks(model_index.prompt(key, token_ids, cache_salt)):
                yield model_index, held
