"""The prefix index of one model, with caches for the lookups that one request repeats."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace_kv.layout.layout import WorkerRef
from headrace_kv.prefix.events import Tier
from headrace_kv.prefix.hashing import PrefixHasher, PromptHashes, TokenIds, prefix_hasher
from headrace_router.prefix_cache.index import PrefixIndex
from headrace_router.workers.table import LoadTable, Numbers

# Between two slices of a sweep, so that requests are served first.
_SWEEP_PAUSE_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class TableSlots:
    """The workers of a table that an index follows: `rows[i]` of the table has slot `slots[i]`."""

    table: LoadTable
    generation: int
    slots: NDArray[np.intp]
    rows: NDArray[np.intp]


class ModelIndex:
    """The prefix index of one model, in blocks of one size."""

    def __init__(self, model: str, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.index = PrefixIndex()
        self._model = model
        self._hasher: PrefixHasher | None = None
        self._table_slots: TableSlots | None = None
        self._tokens: object = None
        self._cache_salt = ""
        self._prompt: PromptHashes | None = None
        self._blocks: list[Numbers] = []
        self._blocks_prompt: PromptHashes | None = None
        self._blocks_state = (0, 0)
        self._refs: object = None
        self._refs_generation = 0
        self._refs_slots: NDArray[np.intp] = np.array([], np.intp)

    def prompt(self, key: int, token_ids: TokenIds, cache_salt: str) -> PromptHashes:
        """The hashes of a prompt. Cached for a tuple, because a request looks up its prompt several times."""
        if self._prompt is None or self._tokens is not token_ids or self._cache_salt != cache_salt:
            hasher = self._hasher_of(key)
            prompt = hasher.lazy(token_ids, hasher.root_of(cache_salt))
            if not isinstance(token_ids, tuple):
                return prompt
            self._tokens, self._cache_salt, self._prompt = token_ids, cache_salt, prompt
        return self._prompt

    def slots_of(self, refs: Collection[WorkerRef]) -> NDArray[np.intp]:
        """The slots of these workers. Cached for a frozenset, while no worker changes its slot."""
        if self._refs is not refs or self._refs_generation != self.index.generation:
            slots = self.index.slots(self.index.mask(refs))
            if not isinstance(refs, frozenset):
                return slots
            self._refs, self._refs_generation = refs, self.index.generation
            self._refs_slots = slots
        return self._refs_slots

    def blocks(self, prompt: PromptHashes) -> list[Numbers]:
        """By tier, fastest first, how many blocks of the prompt each worker holds. Shape [slot].

        Cached while the index is unchanged: a request looks up its decode workers, then its prefill workers.
        """
        index = self.index
        # A new worker may have a slot beyond the last one.
        state = index.change_count, index.generation
        if self._blocks_prompt is not prompt or self._blocks_state != state:
            self._blocks = [index.blocks(index.find_prompt(prompt, tier=tier)) for tier in Tier]
            self._blocks_prompt, self._blocks_state = prompt, state
        return self._blocks

    def table_slots(self, table: LoadTable) -> TableSlots:
        """The slots of a table's workers. Cached for one table, while no worker changes its slot."""
        cached = self._table_slots
        if (
            cached is None
            or cached.table is not table
            or cached.generation != self.index.generation
        ):
            cached = self._table_slots = self._find_slots(table)
        return cached

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

    def _find_slots(self, table: LoadTable) -> TableSlots:
        row_of = {worker.ref: row for row, worker in enumerate(table.workers)}
        slots = self.index.slots(self.index.mask(row_of))
        return TableSlots(
            table=table,
            generation=self.index.generation,
            slots=slots,
            rows=np.array([row_of[ref] for ref in self.index.refs(slots)], np.intp),
        )
