"""Opens the tiers below the KV memory of a sim engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import ParamSpec, TypeVar

from headrace_engine.connector.pool_planner import PoolLookup
from headrace_kv.layout import KvDescriptor
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.copier import TierCopier, block_bytes_of
from headrace_kv.tiers.tiers import (
    TierSettings,
)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class InlineExecutor(Executor):
    """Runs what it gets at once, so that a clock of a test need not wait for copies."""

    def submit(
        self,
        call: Callable[Parameters, Result],
        /,
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> Future[Result]:
        ended: Future[Result] = Future()
        try:
            ended.set_result(call(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - as in any executor
            ended.set_exception(error)
        return ended


class WakingLookup:
    """Asks the store of a remote pool, and calls `wake` when it has answered."""

    def __init__(self, lookup: PoolLookup, wake: Callable[[], None]) -> None:
        self._lookup = lookup
        self._wake = wake

    def find(self, prefixes: Sequence[int], timeout_s: float) -> Future[int] | None:
        """See BlockLookup.find."""
        found = self._lookup.find(prefixes, timeout_s)
        if found is not None:
            found.add_done_callback(lambda _: self._wake())
        return found


def tier_counts(
    descriptor: KvDescriptor, settings: TierSettings, host_blocks: int, disk_blocks: int
) -> Mapping[Tier, int]:
    """Blocks of each tier. The given counts apply where `settings` have no tier.

    Raises ConfigError for a model with several caches.
    """
    counts: Mapping[Tier, int] = {Tier.HOST: host_blocks, Tier.DISK: disk_blocks}
    if settings.names:
        block_bytes = block_bytes_of(descriptor.layout, 0, pooled=settings.pooled)
        counts = settings.block_counts(block_bytes)
    return {tier: count for tier, count in counts.items() if count}


def open_copiers(
    descriptor: KvDescriptor, settings: TierSettings, counts: Mapping[Tier, int]
) -> list[TierCopier]:
    """One for each rank; none without tiers."""
    if not counts:
        return []
    return [
        TierCopier(
            descriptor.layout,
            memory,
            host_blocks=counts[Tier.HOST],
            disk_blocks=counts.get(Tier.DISK, 0),
            disk_folder=Path(settings.disk_folder),
            pooled=settings.pooled,
        )
        for memory in descriptor.ranks
    ]
