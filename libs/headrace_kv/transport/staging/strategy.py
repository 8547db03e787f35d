"""Chooses the strategy of a write and the order in which runs are staged."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_kv.plan.copy_plan import Int64Array, Runs
from headrace_kv.transport.base import Strategy
from headrace_kv.transport.packing import by_length
from headrace_kv.transport.staging.cost_model import (
    TransferCosts,
    WireCostModel,
    cheapest_strategy,
    direct_bytes_min,
    shape_of,
)

_CACHE_SIZE = 64
# Plans expire because the measured costs change.
_PLAN_TTL_S = 1.0


@dataclass(frozen=True, eq=False, slots=True)
class StagingPlan:
    """A strategy for the runs `staged`, in that order; None stands for all runs as listed.

    The runs `direct` are so long that they are written one by one. Both are indices of runs, which do not depend on the
    absolute addresses: the same runs, moved, share a plan.
    """

    strategy: Strategy
    staged: Int64Array | None
    direct: Int64Array | None


@dataclass(frozen=True, eq=False, slots=True)
class _CachedPlan:
    # Referenced, so that the id of the array cannot be reused.
    lengths: Int64Array
    until_s: float
    plan: StagingPlan


_Key = tuple[int, int, int, int, frozenset[Strategy]]


class StagingPlanner:
    """Plans by the costs of past writes. One thread calls `plan`, any thread the other methods."""

    def __init__(self, wire: WireCostModel) -> None:
        self._wire = wire
        self._cache: OrderedDict[_Key, _CachedPlan] = OrderedDict()
        self._lock = threading.Lock()
        self._wire_free_s = 0.0

    @property
    def costs(self) -> TransferCosts:
        """The current costs."""
        return self._wire.costs

    def plan(self, runs: Runs, allowed: frozenset[Strategy]) -> StagingPlan:
        """The cheapest plan of the allowed strategies. Runs that CopyPlanner moved share a plan for a while."""
        if not len(runs):
            return StagingPlan(cheapest_strategy(self.costs, shape_of(runs), allowed), None, None)
        source, destination = runs.source_addresses, runs.destination_addresses
        key = (
            id(runs.lengths),
            len(runs),
            int(source[-1] - source[0]),
            int(destination[-1] - destination[0]),
            allowed,
        )
        now_s = time.monotonic()
        found = self._cache.get(key)
        if found is None or found.until_s < now_s:
            plan = plan_staging(self.costs, runs, allowed)
            found = _CachedPlan(runs.lengths, now_s + _PLAN_TTL_S, plan)
            self._cache[key] = found
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return found.plan

    def observe(self, entry_count: int, payload_bytes: int, start_s: float) -> None:
        """A write that was submitted at `start_s` has just ended. The wire carried earlier writes first."""
        end_s = time.monotonic()
        with self._lock:
            wire_start_s = max(start_s, self._wire_free_s)
            self._wire_free_s = end_s
        self._wire.observe(entry_count, payload_bytes, end_s - wire_start_s)


def plan_staging(costs: TransferCosts, runs: Runs, allowed: frozenset[Strategy]) -> StagingPlan:
    """Separates the long runs if "direct" is allowed, and chooses for the others. `runs` must not be empty."""
    lengths = runs.lengths
    direct: Int64Array | None = None
    staged: Int64Array | None = None
    rest = runs
    if "direct" in allowed:
        long: NDArray[np.bool_] = lengths >= direct_bytes_min(costs)
        if long.all():
            return StagingPlan("direct", None, None)
        if long.any():
            direct, staged = np.flatnonzero(long), np.flatnonzero(~long)
            rest = select(runs, staged)
    strategy = cheapest_strategy(costs, shape_of(rest), allowed)
    if strategy == "direct":
        return StagingPlan("direct", None, None)
    inner = _staging_order(strategy, rest)
    if inner is not None:
        staged = inner if staged is None else staged[inner]
    return StagingPlan(strategy, staged, direct)


def select(runs: Runs, which: Int64Array) -> Runs:
    """Some of the runs, in the order given."""
    return Runs(
        runs.source_addresses[which], runs.destination_addresses[which], runs.lengths[which]
    )


def _staging_order(strategy: Strategy, runs: Runs) -> Int64Array | None:
    """The order in which neighbours are adjacent. For "gather_scatter", an order that makes copies fast."""
    if strategy == "gather_scatter":
        return by_length(runs.lengths)
    addresses = runs.destination_addresses if strategy == "gather" else runs.source_addresses
    if bool((addresses[1:] >= addresses[:-1]).all()):
        return None
    return np.argsort(addresses, kind="stable")
