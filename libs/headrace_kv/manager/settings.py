"""How much KV is kept below KV memory, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace_common.errors import ConfigError
from headrace_kv.prefix.events import Tier

_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The tiers of one rank: GiB in main memory, GiB on disk, and the folder of the file.

    A block is stored when it was offered `min_uses` times. Blocks reach the disk from main memory only.

    `pool_address`: host:port of the master of a remote pool; empty means none. A request waits `pool_timeout_s` for
    blocks of it at most. With `publishes`, blocks that are stored in main memory are stored there too.

    With `sends_from_host`, a prefill worker sends cached blocks straight from main memory.
    """

    host_gib: float = 0.0
    disk_gib: float = 0.0
    disk_folder: str = "/var/tmp"
    min_uses: int = 1
    pool_address: str = ""
    pool_timeout_s: float = 1.0
    publishes: bool = False
    sends_from_host: bool = True

    @property
    def pooled(self) -> bool:
        """Whether there is a remote pool."""
        return bool(self.pool_address)

    @property
    def names(self) -> tuple[Tier, ...]:
        """The tiers, from the fastest to the slowest."""
        sizes = {Tier.HOST: self.host_gib, Tier.DISK: self.disk_gib}
        return tuple(tier for tier, size_gib in sizes.items() if size_gib)

    def block_counts(self, block_bytes: int) -> Mapping[Tier, int]:
        """Blocks of each tier. Raises ConfigError for a tier that is smaller than a block."""
        sizes = {
            Tier.HOST: ("kv_host_gib", self.host_gib),
            Tier.DISK: ("kv_disk_gib", self.disk_gib),
        }
        counts: dict[Tier, int] = {}
        for tier in self.names:
            setting, size_gib = sizes[tier]
            counts[tier] = int(size_gib * _GIB) // block_bytes
            if not counts[tier]:
                raise ConfigError(
                    f"{setting} is {size_gib:g}, but one block has {block_bytes / _GIB:.3g} GiB: raise it",
                    metadata={"field": setting},
                )
        return counts
