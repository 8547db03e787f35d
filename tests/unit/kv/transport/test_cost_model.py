"""The cost model: run shapes, the cheapest strategy, and the fit to measured writes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_kv.plan.copy_plan import Runs
from headrace_kv.transport.base import Strategy
from headrace_kv.transport.staging.cost_model import (
    RunShape,
    TransferCosts,
    WireCostModel,
    cheapest_strategy,
    direct_bytes_min,
    initial_costs,
    shape_of,
    strategy_seconds,
)
from headrace_kv.transport.staging.strategy import StagingPlanner, plan_staging, select

TCP = TransferCosts(entry_s=20e-6, byte_s=0.35e-9)
EVERY: frozenset[Strategy] = frozenset({"direct", "gather", "scatter", "gather_scatter"})
KIB = 1024


def runs_of(sources: list[int], destinations: list[int], lengths: list[int]) -> Runs:
    return Runs(*(np.array(values, np.int64) for values in (sources, destinations, lengths)))


def scattered(count: int, length: int) -> Runs:
    """Runs with gaps on both sides."""
    starts = (np.arange(count) * (length + 64)).tolist()
    return runs_of(starts, starts[::-1], [length] * count)


@pytest.mark.parametrize(
    "shape, strategy",
    [
        (RunShape(4, 4 << 20, 4, 4), "direct"),
        (RunShape(4096, 4 << 20, 4096, 4096), "gather_scatter"),
        (RunShape(4096, 4 << 20, 4096, 4), "gather"),
        (RunShape(4096, 4 << 20, 4, 4096), "scatter"),
        (RunShape(4096, 4 << 20, 2, 2), "gather"),
        (RunShape(3, 3 * KIB, 3, 3), "direct"),
    ],
)
def test_the_cheapest_strategy_by_shape(shape: RunShape, strategy: Strategy) -> None:
    assert cheapest_strategy(TCP, shape, EVERY) == strategy


def test_only_allowed_strategies_are_chosen() -> None:
    short = RunShape(4096, 4 << 20, 4096, 4096)
    assert cheapest_strategy(TCP, short, {"direct"}) == "direct"
    assert (
        cheapest_strategy(TCP, RunShape(1, 1 << 20, 1, 1), {"gather_scatter"}) == "gather_scatter"
    )


@given(
    st.integers(1, 100_000),
    st.integers(1, 1 << 26),
    st.integers(0, 100_000),
    st.integers(0, 1 << 26),
)
def test_more_runs_and_bytes_never_cost_less(
    runs: int, nbytes: int, more_runs: int, more_bytes: int
) -> None:
    few = strategy_seconds(TCP, RunShape(runs, nbytes, runs, runs))
    total = runs + more_runs
    many = strategy_seconds(TCP, RunShape(total, nbytes + more_bytes, total, total))
    assert all(many[strategy] >= few[strategy] for strategy in few)


@given(st.floats(1e-7, 1e-3))
def test_the_length_of_direct_runs_grows_with_the_cost_of_an_entry(entry_s: float) -> None:
    less, more = (replace(TCP, entry_s=entry_s * factor) for factor in (1.0, 1.5))
    assert direct_bytes_min(more) >= direct_bytes_min(less)


def test_extents_are_counted_in_any_order() -> None:
    runs = runs_of([300, 0, 100, 200], [0, 500, 700, 900], [100, 100, 100, 100])
    assert shape_of(runs) == RunShape(4, 400, 1, 4)
    turned = Runs(runs.destination_addresses, runs.source_addresses, runs.lengths)
    assert shape_of(turned) == RunShape(4, 400, 4, 1)
    assert shape_of(select(runs, np.array([], np.int64))) == RunShape(0, 0, 0, 0)


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
        assert len(select(runs, found.staged).merge()) == count
        backward = runs.destination_addresses if strategy == "gather" else runs.source_addresses
        assert bool((np.diff(backward[found.staged]) == 256).all())


def test_moved_runs_share_a_plan() -> None:
    planner = StagingPlanner(WireCostModel(TCP))
    runs = scattered(1000, KIB)
    moved = Runs(runs.source_addresses + 99, runs.destination_addresses - 7, runs.lengths)
    first = planner.plan(runs, EVERY)
    assert planner.plan(moved, EVERY) is first
    assert planner.plan(moved, frozenset({"direct"})) is not first
    assert planner.plan(scattered(1000, KIB), EVERY) is not first


def test_the_constants_of_the_wire_are_fitted() -> None:
    """Writes of two kinds determine both constants, roughly: the start values keep some weight."""
    wire = WireCostModel(TCP)
    for _ in range(300):
        for entries, nbytes in ((256, 1 << 20), (4, 4 << 20)):
            wire.observe(entries, nbytes, entries * 50e-6 + nbytes * 0.2e-9)
    assert wire.costs.entry_s == pytest.approx(50e-6, rel=0.3)
    assert wire.costs.byte_s == pytest.approx(0.2e-9, rel=0.3)


def test_outliers_have_a_bounded_effect() -> None:
    wire = WireCostModel(TCP)
    wire.observe(0, 0, 1.0)
    wire.observe(4, 1 << 20, -1.0)
    assert wire.costs == TCP
    wire.observe(4, 4 << 20, 3600.0)
    assert wire.costs.byte_s < 2.0 * TCP.byte_s
    for _ in range(1000):
        wire.observe(4, 4 << 20, 3600.0)
    assert wire.costs.byte_s <= 8.0 * TCP.byte_s


def test_copy_costs_are_measured_on_this_machine() -> None:
    costs = initial_costs("mooncake/tcp")
    assert 1e-12 < costs.gather_byte_s < 1e-8
    assert 1e-12 < costs.scatter_byte_s < 1e-8
    assert costs.entry_s == TCP.entry_s
    assert initial_costs("unheard of").entry_s < costs.entry_s
