"""The prefix index of one model, with caches for the lookups that one request repeats."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Collection
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
        cached = self._indexed.get(type(given))
        if (
            cached is None
            or cached.given is not given
            or cached.generation != self.index.generation
        ):
            cached = self._find_slots(given)
            if isinstance(given, LoadTable | frozenset):
                self._indexed[type(given)] = cached
        return cached

    def blocks(self, prompt: PromptHashes) -> list[Numbers]:
        """By tier, fastest first, how many blocks of the prompt each worker holds. Shape [slot].

        Cached while the index is unchanged: a request looks up its decode workers, then its prefill workers.
        """
        change_count = self.index.change_count
        if self._blocks_prompt is not prompt or self._blocks_change_count != change_count:
            self._blocks = [self.index.find(prompt, tier) for tier in Tier]
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
