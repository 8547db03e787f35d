"""What a block in a slower tier is worth, as a share of a block in KV memory. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import numpy as np

from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.events import Tier
from headrace_router.workers.table import Numbers

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
