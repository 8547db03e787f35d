"""How runs are written: by shape, with long runs apart, in which order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace_kv.copy_plan import Runs
from headrace_kv.transport.base import Strategy, Thresholds
from headrace_kv.transport.mooncake import MooncakeTransport
from headrace_kv.transport.staging import StagingPlanner, choose_strategy, plan_staging

TCP = MooncakeTransport("127.0.0.1", "tcp").thresholds
EVERY: frozenset[Strategy] = frozenset({"direct", "gather", "scatter", "gather_scatter"})
KIB = 1024


def runs_of(sources: list[int], destinations: list[int], lengths: list[int]) -> Runs:
    return Runs(*(np.array(values, np.int64) for values in (sources, destinations, lengths)))


def scattered(count: int, length: int) -> Runs:
    """Runs with gaps on both sides."""
    starts = (np.arange(count) * (length + 64)).tolist()
    return runs_of(starts, starts[::-1], [length] * count)


@given(st.integers(1, 300), st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_longer_runs_are_never_staged_where_shorter_ones_are_not(
    count: int, length: int, more: int
) -> None:
    short, long = scattered(count, length), scattered(count, length + more)
    if choose_strategy(TCP, short, EVERY) == "direct":
        assert choose_strategy(TCP, long, EVERY) == "direct"


def test_long_runs_are_direct_beside_short_ones() -> None:
    short, long = scattered(1000, KIB), scattered(2, 1 << 20)
    mixed = Runs(
        np.concatenate([long.source_addresses, short.source_addresses]),
        np.concatenate([long.destination_addresses, short.destination_addresses]),
        np.concatenate([long.lengths, short.lengths]),
    )
    found = plan_staging(TCP, mixed, EVERY)
    assert found.strategy == "gather_scatter"
    assert found.direct is not None
    assert found.staged is not None
    assert found.direct.tolist() == [0, 1]
    assert sorted(found.staged.tolist()) == list(range(2, 1002))
    whole = plan_staging(TCP, mixed, frozenset({"gather_scatter"}))
    assert whole.direct is None


def test_neighbours_are_adjacent_in_the_order_of_staging() -> None:
    count = 2000
    backwards = (np.arange(count)[::-1] * 256).tolist()
    apart = (np.arange(count) * 1000).tolist()
    for strategy, source, destination in (
        ("gather", apart, backwards),
        ("scatter", backwards, apart),
    ):
        runs = runs_of(source, destination, [256] * count)
        found = plan_staging(TCP, runs, EVERY)
        assert found.strategy == strategy
        assert found.staged is not None
        assert len(runs.select(found.staged).merge()) == count
        backward = runs.destination_addresses if strategy == "gather" else runs.source_addresses
        assert bool((np.diff(backward[found.staged]) == 256).all())


def test_moved_runs_share_a_plan() -> None:
    planner = StagingPlanner(Thresholds(long_bytes=128 * KIB))
    runs = scattered(1000, KIB)
    moved = Runs(runs.source_addresses + 99, runs.destination_addresses - 7, runs.lengths)
    first = planner.plan(runs, EVERY)
    assert planner.plan(moved, EVERY) is first
    assert planner.plan(moved, frozenset({"direct"})) is not first
    assert planner.plan(scattered(1000, KIB), EVERY) is not first
