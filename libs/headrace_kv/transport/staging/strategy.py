"""Chooses the strategy of a write and the order in which runs are staged. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace_kv.copy_plan import Int64Array, Runs
from headrace_kv.transport.base import Strategy
from headrace_kv.transport.memory import by_length

_CACHE_SIZE = 64


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When entries are so long or so few that to avoid them costs more than to write them.

    `long_bytes`: an entry of this length costs as little as the copies that staging needs for its bytes.
    `few_entries`: as many entries cost as little as the message that asks the receiver to copy.
    """

    long_bytes: int
    few_entries: int = 16

    def are_cheap(self, entry_count: int, payload_bytes: int) -> bool:
        """Whether entries of some bytes together are few, or long on average."""
        return entry_count <= self.few_entries or payload_bytes >= entry_count * self.long_bytes


# bench/results/transport_costs.md.
_TCP: Final = Thresholds(long_bytes=96 * 1024)
# Not measured on a real adapter. Chosen so that only very short runs are staged.
_OTHER: Final = Thresholds(long_bytes=12 * 1024, few_entries=64)


def thresholds_of(wire: str) -> Thresholds:
    """The thresholds of a transport by KvTransport.wire."""
    return _TCP if wire == "mooncake/tcp" else _OTHER


@dataclass(frozen=True, eq=False, slots=True)
class StagingPlan:
    """A strategy for the runs `staged`, in that order; None stands for all runs as listed.

    The runs `direct` are so long that they are written one by one. Both are indices of runs, which do not depend on the
    absolute addresses: the same runs, moved, share a plan.
    """

    strategy: Strategy
    staged: Int64Array | None
    direct: Int64Array | None


_Key = tuple[int, int, int, int, frozenset[Strategy]]


class StagingPlanner:
    """Keeps the last plans. One thread calls `plan`."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        # With the lengths, so that the id of the array cannot be reused.
        self._cache: OrderedDict[_Key, tuple[Int64Array, StagingPlan]] = OrderedDict()

    def plan(self, runs: Runs, allowed: frozenset[Strategy]) -> StagingPlan:
        """A plan of the allowed strategies. Runs that CopyPlanner moved share a plan."""
        if not len(runs):
            return plan_staging(self._thresholds, runs, allowed)
        source, destination = runs.source_addresses, runs.destination_addresses
        key = (
            id(runs.lengths),
            len(runs),
            int(source[-1] - source[0]),
            int(destination[-1] - destination[0]),
            allowed,
        )
        found = self._cache.get(key)
        if found is None:
            found = runs.lengths, plan_staging(self._thresholds, runs, allowed)
            self._cache[key] = found
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return found[1]


def plan_staging(thresholds: Thresholds, runs: Runs, allowed: frozenset[Strategy]) -> StagingPlan:
    """Separates the long runs if "direct" is allowed, and chooses for the others. `allowed` must not be empty."""
    direct: Int64Array | None = None
    staged: Int64Array | None = None
    rest = runs
    if "direct" in allowed:
        long: NDArray[np.bool_] = runs.lengths >= thresholds.long_bytes
        if long.all():
            return StagingPlan("direct", None, None)
        if long.any():
            direct, staged = np.flatnonzero(long), np.flatnonzero(~long)
            rest = select(runs, staged)
    strategy = choose_strategy(thresholds, rest, allowed)
    if strategy == "direct":
        return StagingPlan("direct", None, None)
    inner = _staging_order(strategy, rest)
    if inner is not None:
        staged = inner if staged is None else staged[inner]
    return StagingPlan(strategy, staged, direct)


def choose_strategy(thresholds: Thresholds, runs: Runs, allowed: frozenset[Strategy]) -> Strategy:
    """The simplest allowed strategy with cheap entries. Where there is none, the one with the fewest entries."""
    entries: dict[Strategy, int] = {"direct": len(runs)}
    nbytes = runs.payload_bytes
    if not ("direct" in allowed and thresholds.are_cheap(len(runs), nbytes)):
        entries["gather"] = extent_count(runs.destination_addresses, runs.lengths)
        entries["scatter"] = extent_count(runs.source_addresses, runs.lengths)
        entries["gather_scatter"] = 1
    possible = {name: count for name, count in entries.items() if name in allowed}
    for name, count in possible.items():
        if thresholds.are_cheap(count, nbytes):
            return name
    return min(possible, key=possible.__getitem__)


def select(runs: Runs, which: Int64Array) -> Runs:
    """Some of the runs, in the order given."""
    return Runs(
        runs.source_addresses[which], runs.destination_addresses[which], runs.lengths[which]
    )


def extent_count(addresses: Int64Array, lengths: Int64Array) -> int:
    """Contiguous ranges that the runs fill on one side, whatever their order."""
    if len(addresses) < 2:
        return len(addresses)
    if np.all(lengths == lengths[0]):
        # Sorting values is several times quicker than finding their order.
        return 1 + int(np.count_nonzero(np.diff(np.sort(addresses)) != lengths[0]))
    if not np.all(addresses[1:] > addresses[:-1]):
        order = np.argsort(addresses)
        addresses, lengths = addresses[order], lengths[order]
    return 1 + int(np.count_nonzero(addresses[1:] != addresses[:-1] + lengths[:-1]))


def _staging_order(strategy: Strategy, runs: Runs) -> Int64Array | None:
    """The order in which neighbours are adjacent. For "gather_scatter", an order that makes copies fast."""
    if strategy == "gather_scatter":
        return by_length(runs.lengths)
    addresses = runs.destination_addresses if strategy == "gather" else runs.source_addresses
    if bool((addresses[1:] >= addresses[:-1]).all()):
        return None
    return np.argsort(addresses, kind="stable")
