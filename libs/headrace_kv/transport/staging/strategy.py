"""Decides how runs get across, and in what order they are staged."""

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
    WireCosts,
    cheapest,
    least_bytes_alone,
    shape_of,
)

_REMEMBERED = 64
# The costs follow the wire, and so must the choice.
_REMEMBERED_S = 1.0


@dataclass(frozen=True, eq=False, slots=True)
class StagingPlan:
    """A strategy for runs `order` (None: all as they are listed); runs `alone` are so long that they go by themselves.

    Indices, shape [some of the runs]. They are a permutation whatever the addresses, so that moved copies of the same
    runs can share them.
    """

    strategy: Strategy
    order: Int64Array | None
    alone: Int64Array | None


@dataclass(frozen=True, eq=False, slots=True)
class _Remembered:
    # Held, so that no other array can have its id.
    lengths: Int64Array
    until_s: float
    arrangement: StagingPlan


_Key = tuple[int, int, int, int, frozenset[Strategy]]


class Arrangements:
    """Chooses by costs that it keeps up to date. `choose` is called by one thread, the rest by any."""

    def __init__(self, wire: WireCosts) -> None:
        self._wire = wire
        self._recent: OrderedDict[_Key, _Remembered] = OrderedDict()
        self._lock = threading.Lock()
        self._wire_free_s = 0.0

    @property
    def costs(self) -> TransferCosts:
        """The costs as known now."""
        return self._wire.costs

    def choose(self, runs: Runs, allowed: frozenset[Strategy]) -> StagingPlan:
        """The cheapest of the strategies allowed. The planner's moved copies of one plan share a choice for a while."""
        if not len(runs):
            return StagingPlan(cheapest(self.costs, shape_of(runs), allowed), None, None)
        source, destination = runs.source_addresses, runs.destination_addresses
        key = (
            id(runs.lengths),
            len(runs),
            int(source[-1] - source[0]),
            int(destination[-1] - destination[0]),
            allowed,
        )
        now_s = time.monotonic()
        found = self._recent.get(key)
        if found is None or found.until_s < now_s:
            arrangement = arrange(self.costs, runs, allowed)
            found = _Remembered(runs.lengths, now_s + _REMEMBERED_S, arrangement)
            self._recent[key] = found
            if len(self._recent) > _REMEMBERED:
                self._recent.popitem(last=False)
        return found.arrangement

    def observe(self, entry_count: int, payload_bytes: int, start_s: float) -> None:
        """A write has ended just now that was submitted at `start_s`; before it the wire had others to carry."""
        end_s = time.monotonic()
        with self._lock:
            begun_s = max(start_s, self._wire_free_s)
            self._wire_free_s = end_s
        self._wire.observe(entry_count, payload_bytes, end_s - begun_s)


def arrange(costs: TransferCosts, runs: Runs, allowed: frozenset[Strategy]) -> StagingPlan:
    """Sets long runs apart where they may go by themselves, and chooses for the others. There must be some runs."""
    lengths = runs.lengths
    alone: Int64Array | None = None
    order: Int64Array | None = None
    rest = runs
    if "direct" in allowed:
        long: NDArray[np.bool_] = lengths >= least_bytes_alone(costs)
        if long.all():
            return StagingPlan("direct", None, None)
        if long.any():
            alone, order = np.flatnonzero(long), np.flatnonzero(~long)
            rest = select(runs, order)
    strategy = cheapest(costs, shape_of(rest), allowed)
    if strategy == "direct":
        return StagingPlan("direct", None, None)
    inner = _staging_order(strategy, rest)
    if inner is not None:
        order = inner if order is None else order[inner]
    return StagingPlan(strategy, order, alone)


def select(runs: Runs, which: Int64Array) -> Runs:
    """Some of the runs, in the order given."""
    return Runs(
        runs.source_addresses[which], runs.destination_addresses[which], runs.lengths[which]
    )


def _staging_order(strategy: Strategy, runs: Runs) -> Int64Array | None:
    """The order in which neighbours meet; for runs that meet on neither side, one that makes copying quick."""
    if strategy == "gather_scatter":
        return by_length(runs.lengths)
    addresses = runs.destination_addresses if strategy == "gather" else runs.source_addresses
    if bool((addresses[1:] >= addresses[:-1]).all()):
        return None
    return np.argsort(addresses, kind="stable")
