"""The blocks of sim engines, for tests: which are free, and which bytes they have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace_engine.sim.cache.memory import SimMemory
from headrace_engine.sim.engine import SimEngine


def free_blocks(engine: SimEngine) -> int:
    """Blocks of all groups that no request holds, cached ones included."""
    return engine._pools.available_count


def guard_violations(engine: SimEngine) -> tuple[tuple[int, int], ...]:
    """Free blocks, as (group, block), that were written to. There are none unless I1 is broken."""
    return tuple(
        (group, block)
        for group, pool in enumerate(engine._pools._pools)
        for block in touched_blocks(engine._memory, group, pool.free_ids())
    )


def touched_blocks(memory: SimMemory, group: int, block_ids: Sequence[int]) -> tuple[int, ...]:
    """Those of the given free blocks of a group that were written to, for a model without verify=off."""
    ids = np.asarray(block_ids, np.intp)
    touched = np.zeros(len(ids), bool)
    for view in memory._views_of(group):
        touched |= (view[:, ids] != memory._guard.astype(view.dtype)).any(axis=(0, 2, 3, 4))
    return tuple(ids[touched].tolist())
