"""Goodput between the measured rates, and how sure a difference between two ways is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

ATTAINED_MIN: Final = 0.9
DRAWS: Final = 1_000
Kept = Mapping[tuple[float, int], Sequence[bool]]
"""Whether each request was good, in the order of arrivals, by rate and seed."""


def goodput(shares: Mapping[float, float]) -> float:
    """Where the share of good requests falls through ATTAINED_MIN, on lines between the measured rates.

    The share at rate 0 counts as 1. The highest measured rate when the share is enough at all of them.
    """
    low, high_share = 0.0, 1.0
    for rate, share in sorted(shares.items()):
        if share < ATTAINED_MIN:
            return low + (rate - low) * (high_share - ATTAINED_MIN) / (high_share - share)
        low, high_share = rate, share
    return low


def goodput_text(shares: Mapping[float, float]) -> str:
    """Goodput as text. It says where the share falls outside of the measured rates."""
    found = goodput(shares)
    bound = "below " if found < min(shares) else "at least " if found == max(shares) else ""
    return f"{bound}{max(found, min(shares)):.2f}/s"


def shares_of(kept: Kept) -> dict[float, float]:
    """The mean over the seeds of the share of good requests, by rate."""
    rates = sorted({rate for rate, _ in kept})
    return {
        rate: float(np.mean([np.mean(good) for (at, _), good in kept.items() if at == rate]))
        for rate in rates
    }


def interval(way: Kept, other: Kept) -> tuple[float, float] | None:
    """The 95 % interval of a way's goodput less another's. None without a seed that both have at all of their rates.

    A bootstrap: each of DRAWS draws takes as many seeds as there are, and of each block as many requests as it has,
    with repetition. Both ways get the same seeds and requests in a draw.
    """
    seeds = sorted(_whole_seeds(way) & _whole_seeds(other))
    if not seeds:
        return None
    drawn = np.random.default_rng(0).integers(0, len(seeds), (DRAWS, len(seeds)))
    differences = _draws(way, seeds, drawn) - _draws(other, seeds, drawn)
    low, high = np.quantile(differences, (0.025, 0.975))
    return float(low), float(high)


def _whole_seeds(kept: Kept) -> set[int]:
    """The seeds that were measured at each rate."""
    rates = {rate for rate, _ in kept}
    return {seed for _, seed in kept if all((rate, seed) in kept for rate in rates)}


def _draws(kept: Kept, seeds: Sequence[int], drawn: np.ndarray) -> np.ndarray:
    """The goodput in each draw. `drawn` has the places of its seeds."""
    shares = {}
    for rate in sorted({rate for rate, _ in kept}):
        blocks = []
        for seed in seeds:
            good = np.array(kept[rate, seed], dtype=float)
            numbers = np.random.default_rng((round(1_000 * rate), abs(seed)))
            blocks.append(good[numbers.integers(0, len(good), (DRAWS, len(good)))].mean(axis=1))
        by_seed = np.stack(blocks, axis=1)
        shares[rate] = np.take_along_axis(by_seed, drawn, axis=1).mean(axis=1)
    return np.array(
        [goodput({rate: share[draw] for rate, share in shares.items()}) for draw in range(DRAWS)]
    )
