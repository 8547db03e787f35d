"""How long loads from lower tiers take, as measured, and how many there were. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace_kv.prefix.events import Tier

# Older loads count for less and less.
_REMEMBERED_BLOCKS: Final = 1_024


@dataclass(frozen=True, slots=True)
class TierLoad:
    """A rank has loaded `block_count` blocks of a tier into KV memory in `seconds`, unless this has `failed`."""

    tier: Tier
    block_count: int
    seconds: float
    failed: bool = False


@dataclass(slots=True)
class _Mean:
    blocks: float = 0.0
    seconds: float = 0.0

    def add(self, load: TierLoad) -> None:
        self.blocks += load.block_count
        self.seconds += load.seconds
        if self.blocks > _REMEMBERED_BLOCKS:
            kept = _REMEMBERED_BLOCKS / self.blocks
            self.blocks *= kept
            self.seconds *= kept


class LoadTimes:
    """The mean over the last loads of each tier. Ranks load at the same time, so that the slowest one counts.

    Loads that failed count only as such.
    """

    def __init__(self) -> None:
        self._means: dict[tuple[Tier, int], _Mean] = {}
        self._loaded: dict[tuple[Tier, int], int] = {}
        self._failed: dict[tuple[Tier, int], int] = {}

    def loaded_blocks(self) -> dict[Tier, int]:
        """How many blocks were loaded from each tier. A block that several ranks have loaded counts once."""
        return _highest_by_tier(self._loaded)

    def failed_blocks(self) -> dict[Tier, int]:
        """How many blocks could not be loaded from each tier. The rank with the most counts."""
        return _highest_by_tier(self._failed)

    def record(self, load: TierLoad, rank: int = 0) -> None:
        """A rank has loaded blocks, or could not load them."""
        if not load.block_count:
            return
        key = (load.tier, rank)
        counts = self._failed if load.failed else self._loaded
        counts[key] = counts.get(key, 0) + load.block_count
        if not load.failed:
            self._means.setdefault(key, _Mean()).add(load)

    def seconds_per_block(self, tier: Tier) -> float | None:
        """None before the first load."""
        means = [mean for (name, _), mean in self._means.items() if name == tier]
        return max((mean.seconds / mean.blocks for mean in means), default=None)


def _highest_by_tier(counts: Mapping[tuple[Tier, int], int]) -> dict[Tier, int]:
    """Of the ranks' counts."""
    found: dict[Tier, int] = {}
    for (tier, _), count in counts.items():
        found[tier] = max(found.get(tier, 0), count)
    return found
