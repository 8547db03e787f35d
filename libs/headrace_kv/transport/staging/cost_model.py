"""The cost of a write by strategy, and the cheapest strategy. Pure, except for the clock.

Gather and scatter overlap with the wire, but over TCP the same cores do both: by default all of their time counts. The
constants of this machine's memory are measured once per process. Those of the wire start from a table and follow the
measured writes.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import numpy as np

from headrace_kv.plan.copy_plan import Int64Array, Runs
from headrace_kv.transport.base import Strategy
from headrace_kv.transport.packing import gather, scatter

_DECAY = 0.98
_PRIOR_WEIGHT = 4.0
# Largest ratio between a constant of the wire and its start value, and between a sample and its expectation.
_DRIFT_RATIO_MAX = 8.0
_SAMPLE_RATIO_MAX = 3.0


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """Seconds per entry, byte, run and message, and the bytes of one staged entry.

    `exposed_share` is the share of the copy time that does not overlap with the wire.
    """

    entry_s: float
    byte_s: float
    gather_run_s: float = 50e-9
    gather_byte_s: float = 0.1e-9
    scatter_run_s: float = 50e-9
    scatter_byte_s: float = 0.1e-9
    message_s: float = 150e-6
    exposed_share: float = 1.0
    staged_entry_bytes: int = 1024 * 1024


@dataclass(frozen=True, slots=True)
class RunShape:
    """The figures of a list of runs that determine its cost. An extent is a contiguous range of one side."""

    run_count: int
    payload_bytes: int
    source_extents: int
    destination_extents: int


WIRE_COSTS = {
    # bench/data_plane/ and bench/transport_costs.py, two cores at 2.8 GHz, loopback.
    "mooncake/tcp": TransferCosts(entry_s=20e-6, byte_s=0.35e-9),
    # Not measured on a real adapter. Chosen so that only very short runs are staged.
    "mooncake/rdma": TransferCosts(entry_s=2e-6, byte_s=0.1e-9),
}
_OTHER = TransferCosts(entry_s=2e-6, byte_s=0.1e-9)


def initial_costs(wire: str) -> TransferCosts:
    """Costs of a transport by KvTransport.wire, with this machine's memory."""
    found = _copy_costs()
    return replace(
        WIRE_COSTS.get(wire, _OTHER),
        gather_run_s=found["gather"][0],
        gather_byte_s=found["gather"][1],
        scatter_run_s=found["scatter"][0],
        scatter_byte_s=found["scatter"][1],
    )


def shape_of(runs: Runs) -> RunShape:
    """The shape of runs in any order."""
    return RunShape(
        run_count=len(runs),
        payload_bytes=runs.payload_bytes,
        source_extents=_extent_count(runs.source_addresses, runs.lengths),
        destination_extents=_extent_count(runs.destination_addresses, runs.lengths),
    )


def strategy_seconds(costs: TransferCosts, shape: RunShape) -> dict[Strategy, float]:
    """Expected seconds by strategy."""
    runs, nbytes = shape.run_count, shape.payload_bytes
    wire_s = nbytes * costs.byte_s
    gather_s = costs.exposed_share * (runs * costs.gather_run_s + nbytes * costs.gather_byte_s)
    scatter_s = costs.exposed_share * (runs * costs.scatter_run_s + nbytes * costs.scatter_byte_s)
    staged_entries = -(-nbytes // costs.staged_entry_bytes)
    gather_entries = max(shape.destination_extents, staged_entries)
    scatter_entries = max(shape.source_extents, staged_entries)
    return {
        "direct": wire_s + runs * costs.entry_s,
        "gather": wire_s + gather_entries * costs.entry_s + gather_s,
        "scatter": wire_s + scatter_entries * costs.entry_s + scatter_s + costs.message_s,
        "gather_scatter": wire_s
        + staged_entries * costs.entry_s
        + gather_s
        + scatter_s
        + costs.message_s,
    }


def cheapest_strategy(
    costs: TransferCosts, shape: RunShape, allowed: Collection[Strategy]
) -> Strategy:
    """The cheapest allowed strategy; of equals, the simpler one. `allowed` must not be empty."""
    found = strategy_seconds(costs, shape)
    return min((s for s in found if s in allowed), key=lambda strategy: found[strategy])


def direct_bytes_min(costs: TransferCosts) -> float:
    """The length from which a direct entry is cheaper for a run than staging it."""
    copies_s = costs.exposed_share * (costs.gather_byte_s + costs.scatter_byte_s)
    runs_s = costs.exposed_share * (costs.gather_run_s + costs.scatter_run_s)
    saved_byte_s = costs.entry_s / costs.staged_entry_bytes
    return max(0.0, costs.entry_s - runs_s) / (copies_s + saved_byte_s)


class WireCostModel:
    """Fits the wire's two constants to measured writes: least squares of relative errors, with decaying weights.

    Any thread may call its methods.
    """

    def __init__(self, costs: TransferCosts) -> None:
        self._initial = costs
        self._lock = threading.Lock()
        self._costs = costs
        # Sums over samples of squares and products, each sample divided by its expectation.
        self._entry_entry = _PRIOR_WEIGHT / costs.entry_s**2
        self._byte_byte = _PRIOR_WEIGHT / costs.byte_s**2
        self._entry_byte = 0.0
        self._entry_time = _PRIOR_WEIGHT / costs.entry_s
        self._byte_time = _PRIOR_WEIGHT / costs.byte_s

    @property
    def costs(self) -> TransferCosts:
        """The current costs."""
        return self._costs

    def observe(self, entry_count: int, payload_bytes: int, seconds: float) -> None:
        """Adds a sample: a write that occupied the wire for `seconds`."""
        if entry_count <= 0 or seconds <= 0.0:
            return
        with self._lock:
            costs = self._costs
            expected_s = entry_count * costs.entry_s + payload_bytes * costs.byte_s
            seconds = min(
                max(seconds, expected_s / _SAMPLE_RATIO_MAX), expected_s * _SAMPLE_RATIO_MAX
            )
            entries, nbytes, taken = (
                value / expected_s for value in (entry_count, payload_bytes, seconds)
            )
            self._decay()
            self._entry_entry += entries * entries
            self._byte_byte += nbytes * nbytes
            self._entry_byte += entries * nbytes
            self._entry_time += entries * taken
            self._byte_time += nbytes * taken
            self._solve()

    def _decay(self) -> None:
        """Reduces the weight of old samples. The start values keep theirs, so that a solution always exists."""
        initial, keep = self._initial, _DECAY
        add = (1.0 - keep) * _PRIOR_WEIGHT
        self._entry_entry = keep * self._entry_entry + add / initial.entry_s**2
        self._byte_byte = keep * self._byte_byte + add / initial.byte_s**2
        self._entry_byte *= keep
        self._entry_time = keep * self._entry_time + add / initial.entry_s
        self._byte_time = keep * self._byte_time + add / initial.byte_s

    def _solve(self) -> None:
        determinant = self._entry_entry * self._byte_byte - self._entry_byte**2
        entry_s = self._entry_time * self._byte_byte - self._byte_time * self._entry_byte
        byte_s = self._byte_time * self._entry_entry - self._entry_time * self._entry_byte
        self._costs = replace(
            self._costs,
            entry_s=_bounded(entry_s / determinant, self._initial.entry_s),
            byte_s=_bounded(byte_s / determinant, self._initial.byte_s),
        )


def _bounded(value: float, initial: float) -> float:
    return min(max(value, initial / _DRIFT_RATIO_MAX), initial * _DRIFT_RATIO_MAX)


def _extent_count(addresses: Int64Array, lengths: Int64Array) -> int:
    if len(addresses) < 2:
        return len(addresses)
    if np.all(lengths == lengths[0]):
        # Sorting values is several times quicker than finding their order.
        return 1 + int(np.count_nonzero(np.diff(np.sort(addresses)) != lengths[0]))
    if not np.all(addresses[1:] > addresses[:-1]):
        order = np.argsort(addresses)
        addresses, lengths = addresses[order], lengths[order]
    return 1 + int(np.count_nonzero(addresses[1:] != addresses[:-1] + lengths[:-1]))


@functools.cache
def _copy_costs() -> dict[str, tuple[float, float]]:
    """Seconds per run and per byte of "gather" and "scatter", measured by copies in short and in long runs."""
    nbytes, short, long = 1 << 20, 1 << 10, 1 << 16
    # Far larger than a cache, so that the copies read memory as those of KV do.
    arena, packed = np.ones(16 * nbytes, np.uint8), np.ones(nbytes, np.uint8)

    def best_s(length: int, copy: Callable[[Int64Array, Int64Array], None]) -> float:
        starts = np.arange(0, len(arena), 16 * length, dtype=np.int64)[::-1]
        lengths = np.full(len(starts), length, np.int64)
        taken = []
        for number in range(3):
            addresses = starts + int(arena.ctypes.data) + number * length
            start_s = time.perf_counter()
            copy(addresses, lengths)
            taken.append(time.perf_counter() - start_s)
        return min(taken)

    copies: dict[str, Callable[[Int64Array, Int64Array], None]] = {
        "gather": lambda addresses, lengths: gather(addresses, lengths, packed),
        "scatter": lambda addresses, lengths: scatter(packed, addresses, lengths),
    }
    found = {}
    for name, copy in copies.items():
        short_s, long_s = best_s(short, copy), best_s(long, copy)
        run_s = max(1e-9, (short_s - long_s) / (nbytes // short))
        found[name] = (run_s, long_s / nbytes)
    return found
