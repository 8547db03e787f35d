"""The shares of routers follow the requests that wait at them, so that all requests wait about equally long."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from random import Random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.callers.priority import Priority
from headrace_prefill.pull.slot_shares import RouterDemand, divide_slots

_WAITING = st.none() | st.dictionaries(st.sampled_from(list(Priority)), st.integers(0, 200))
_DEMANDS = st.dictionaries(
    st.tuples(st.sampled_from("abcdefgh")),
    st.builds(RouterDemand, _WAITING, st.integers(0, 10)),
    max_size=8,
)


def _waiting(**counts: int) -> dict[tuple[str], RouterDemand]:
    return {(name,): RouterDemand({Priority.NORMAL: count}) for name, count in counts.items()}


@settings(max_examples=500, deadline=None)
@given(slot_count=st.integers(1, 64), demands=_DEMANDS)
def test_every_router_has_a_share_and_all_slots_are_used_while_requests_wait(
    slot_count: int, demands: dict[tuple[str], RouterDemand]
) -> None:
    shares = divide_slots(slot_count, demands)
    assert shares.keys() == demands.keys()
    assert all(share >= 1 for share in shares.values())
    # Only the standing share of 1 may exceed the slots.
    assert sum(shares.values()) <= slot_count + len(demands)
    unknown = [name for name, demand in demands.items() if demand.waiting is None]
    assert all(shares[name] == max(1, slot_count // len(demands)) for name in unknown)
    wanting = sum(sum((one.waiting or {}).values()) for one in demands.values())
    if wanting >= slot_count and not unknown:
        assert sum(shares.values()) >= slot_count


@settings(max_examples=500, deadline=None)
@given(
    slot_count=st.integers(1, 64),
    counts=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 200), min_size=1),
)
def test_a_router_gets_the_whole_part_of_its_share_of_the_waiting_requests(
    slot_count: int, counts: dict[str, int]
) -> None:
    shares = divide_slots(slot_count, _waiting(**counts))
    total = sum(counts.values())
    for name, count in counts.items():
        part = slot_count * count / total if total else 0.0
        assert shares[name,] >= max(1, min(count, math.floor(part + 1e-9)))


def test_shares_follow_demand_and_are_equal_without_any() -> None:
    assert divide_slots(8, _waiting(full=90, idle=0)) == {("full",): 8, ("idle",): 1}
    assert divide_slots(8, _waiting(a=90, b=30)) == {("a",): 6, ("b",): 2}
    assert divide_slots(8, _waiting(a=0, b=0)) == {("a",): 4, ("b",): 4}
    # What no router wants is divided equally.
    assert divide_slots(8, _waiting(a=2, b=0)) == {("a",): 5, ("b",): 3}
    assert divide_slots(2, _waiting(a=0, b=0, c=0)) == {("a",): 1, ("b",): 1, ("c",): 1}
    assert divide_slots(4, {}) == {}
    # A router of an older version reports nothing, and keeps its equal share.
    old = {**_waiting(a=90, b=0), ("old",): RouterDemand(None)}
    assert divide_slots(9, old) == {("a",): 6, ("b",): 1, ("old",): 3}


def test_a_class_has_its_weight_over_all_routers() -> None:
    demands = {
        ("a",): RouterDemand({Priority.HIGH: 10}),
        ("b",): RouterDemand({Priority.LOW: 1_000}),
    }
    assert divide_slots(17, demands) == {("a",): 10, ("b",): 7}
    demands[("a",)] = RouterDemand({Priority.HIGH: 100})
    assert divide_slots(17, demands) == {("a",): 16, ("b",): 1}


Divide = Callable[[int, Mapping[tuple[str], RouterDemand]], dict[tuple[str], int]]


def _equally(slot_count: int, demands: Mapping[tuple[str], RouterDemand]) -> dict[tuple[str], int]:
    return dict.fromkeys(demands, slot_count // len(demands))


class Worker:
    """Steps of equal length on one worker with 8 slots. A task takes one step. Demand is reported after each step."""

    def __init__(self, divide: Divide, arrivals: Mapping[str, float], seed: int) -> None:
        self._divide = divide
        self._arrivals = arrivals
        self._random = Random(seed)
        self._queues: dict[str, deque[int]] = {name: deque() for name in arrivals}
        self.waits: dict[str, list[int]] = {name: [] for name in arrivals}

    def run(self, steps: int) -> None:
        for step in range(steps):
            for name, rate in self._arrivals.items():
                count = int(rate) + (self._random.random() < rate % 1)
                self._queues[name].extend([step] * count)
            demands = {
                (name,): RouterDemand({Priority.NORMAL: len(queue)})
                for name, queue in self._queues.items()
            }
            free = 8
            for (name,), share in self._divide(8, demands).items():
                queue = self._queues[name]
                for _ in range(min(share, len(queue), free)):
                    self.waits[name].append(step - queue.popleft())
                    free -= 1


@pytest.mark.parametrize("seed", range(3))
def test_an_overloaded_router_uses_what_an_idle_one_leaves(seed: int) -> None:
    """6.5 tasks a step for one router, 0.5 for the other, on 8 slots. Equal shares would give the first 4."""
    arrivals = {"full": 6.5, "idle": 0.5}
    by_demand, equal = Worker(divide_slots, arrivals, seed), Worker(_equally, arrivals, seed)
    by_demand.run(1_000)
    equal.run(1_000)
    assert max(by_demand.waits["full"]) <= 2
    assert max(by_demand.waits["idle"]) <= 2
    # The queue of the full router grows with every step.
    assert max(equal.waits["full"]) > 300


@pytest.mark.parametrize("seed", range(3))
def test_beyond_all_capacity_the_requests_of_both_routers_wait_about_equally_long(
    seed: int,
) -> None:
    arrivals = {"a": 9.0, "b": 3.0}
    by_demand, equal = Worker(divide_slots, arrivals, seed), Worker(_equally, arrivals, seed)
    by_demand.run(1_000)
    equal.run(1_000)
    assert mean(by_demand.waits["b"]) == pytest.approx(mean(by_demand.waits["a"]), rel=0.1)
    assert mean(equal.waits["a"]) > 100 * (mean(equal.waits["b"]) + 1)
