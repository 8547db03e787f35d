"""The writes of one step, as arrays over all of its chunks."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from headrace_engine.sim.cache.memory import SimMemory
from headrace_engine.sim.model.bit_mixer import U64Array
from headrace_engine.sim.step.step_plan import Chunk
from headrace_kv.layout.layout import STATE, CacheGroup


class StepWrites:
    """The positions of a step with their hashes and blocks, and the states that it advances."""

    def __init__(self, chunks: Items[Chunk], groups: tuple[CacheGroup, ...]) -> None:
        self._positions = np.concatenate(
            [np.arange(chunk.start, chunk.end, dtype=np.uint64) for chunk in chunks]
        )
        self._hashes = np.concatenate(
            [chunk.sequence.hashes[chunk.start : chunk.end] for chunk in chunks]
        )
        self._blocks = tuple(_blocks(chunks, index, group) for index, group in enumerate(groups))
        self._advances: _Advances | None = None
        if any(group.kind == STATE for group in groups):
            self._advances = _advances(chunks)

    def execute(self, memory: SimMemory, layers: range) -> None:
        """Writes these layers."""
        memory.write(layers, self._hashes, self._positions, self._blocks)
        if self._advances is not None:
            memory.advance_states(layers, *self._advances, self._blocks)


_Advances = tuple[U64Array, U64Array, NDArray[np.bool_]]
"""Of each advanced state: the hashes before and after, and whether there is none before."""


def _advances(chunks: Items[Chunk]) -> _Advances:
    is_first = np.array([chunk.start == 0 for chunk in chunks])
    # The first chunk of a prompt has no hash before it; any value will do.
    before = _hashes_at(chunks, [max(0, chunk.start - 1) for chunk in chunks])
    return before, _hashes_at(chunks, [chunk.end - 1 for chunk in chunks]), is_first


def _blocks(chunks: Items[Chunk], index: int, group: CacheGroup) -> U64Array:
    """Each position's block, or each chunk's page of a state."""
    tables = [chunk.sequence.block_tables[index] for chunk in chunks]
    if group.kind == STATE:
        return np.concatenate(tables)
    return np.concatenate(
        [
            table[np.arange(chunk.start, chunk.end) // group.block_tokens]
            for chunk, table in zip(chunks, tables, strict=True)
        ]
    )


def _hashes_at(chunks: Items[Chunk], positions: Items[int]) -> U64Array:
    return np.array(
        [
            chunk.sequence.hashes[position]
            for chunk, position in zip(chunks, positions, strict=True)
        ],
        np.uint64,
    )
