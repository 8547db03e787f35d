"""What a block in a slower tier is worth, as a share of a block in KV memory. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from headrace_kv.layout.layout import WorkerRef
from headrace_kv.prefix.events import Tier
from headrace_router.workers.table import LoadTable, Numbers

SLOWER_TIERS: Final = (Tier.HOST, Tier.DISK)
UNMEASURED_SHARES: Final = (0.75, 0.25)
"""Of the slower tiers, while a load or a computed token was not measured."""
# A smaller change of a worker's load time changes no price.
_NOTED_CHANGE: Final = 0.1


def share_of_loaded(load_s: float, compute_s: float) -> float:
    """The share of computing a block that loading it saves. 0 when loading takes longer."""
    return max(0.0, 1.0 - load_s / compute_s) if compute_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Columns:
    """Seconds to load a block, by slower tier and row of a table; not a number where it was not measured."""

    table: LoadTable
    change_count: int
    load_s: Sequence[Numbers]


class TierPrices:
    """The load times that workers have measured, against the time of computing.

    `compute_s_per_token` returns the seconds in which a prefill worker computes a token of a model; 0 before the first.
    """

    def __init__(self, compute_s_per_token: Callable[[str], float]) -> None:
        self._compute_s_per_token = compute_s_per_token
        self._load_s: dict[WorkerRef, dict[Tier, float]] = {}
        self._change_count = 0
        self._columns: dict[str, _Columns] = {}

    def measured(self, ref: WorkerRef, tier: Tier, load_s: float) -> None:
        """A worker loads a block of a tier in `load_s`."""
        times = self._load_s.setdefault(ref, {})
        known = times.get(tier)
        if known is None or abs(load_s - known) > _NOTED_CHANGE * known:
            times[tier] = load_s
            self._change_count += 1

    def remove(self, ref: WorkerRef) -> None:
        """Forgets a worker."""
        if self._load_s.pop(ref, None) is not None:
            self._change_count += 1

    def shares(self, model: str, block_tokens: int, table: LoadTable) -> list[Numbers]:
        """By slower tier, the share of each worker of the table. Shape [worker]."""
        compute_s = block_tokens * self._compute_s_per_token(model)
        if compute_s <= 0 or not self._load_s:
            return [np.full(len(table), share) for share in UNMEASURED_SHARES]
        shares: list[Numbers] = []
        for load_s, unmeasured in zip(
            self._load_times(model, table), UNMEASURED_SHARES, strict=True
        ):
            saved = np.maximum(0.0, 1.0 - load_s / compute_s)
            shares.append(np.where(np.isnan(load_s), unmeasured, saved))
        return shares

    def shares_of(self, model: str, block_tokens: int, ref: WorkerRef) -> list[float]:
        """By slower tier, the share of one worker, in either role."""
        compute_s = block_tokens * self._compute_s_per_token(model)
        times = self._load_s.get(ref, {}) if compute_s > 0 else {}
        return [
            share_of_loaded(times[tier], compute_s) if tier in times else unmeasured
            for tier, unmeasured in zip(SLOWER_TIERS, UNMEASURED_SHARES, strict=True)
        ]

    def _load_times(self, model: str, table: LoadTable) -> Sequence[Numbers]:
        """Cached for one table of a model, while no load time changes."""
        known = self._columns.get(model)
        if known is None or known.table is not table or known.change_count != self._change_count:
            load_s = [
                np.array(
                    [self._load_s.get(worker.ref, {}).get(tier, np.nan) for worker in table.workers]
                )
                for tier in SLOWER_TIERS
            ]
            known = self._columns[model] = _Columns(table, self._change_count, load_s)
        return known.load_s
