"""How a prefill worker divides its slots among routers: in proportion to the requests that wait at them. Pure.

Each router has a queue of its own. If a worker divided its slots equally, a request at a full router would wait longer
than one at an idle router. With shares that follow the waiting requests, all requests wait about equally long, as in
one queue.

Classes first share the slots by their weights, as they share each queue. Then routers share the slots of a class by
their waiting tasks of that class.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from headrace_common.callers.priority import Priority

Router = TypeVar("Router", bound=tuple[str, ...])
"""What identifies a router."""


@dataclass(frozen=True, slots=True)
class RouterDemand:
    """The tasks that wait at a router by class, and those that it has on the worker.

    `waiting` is None while the router has not reported it.
    """

    waiting: Mapping[Priority, int] | None = None
    running: int = 0

    @property
    def wanted(self) -> int:
        """The slots that the router could use now."""
        return self.running + sum((self.waiting or {}).values())

    def count(self, priority: Priority) -> int:
        """The tasks of a class that wait."""
        return self.waiting.get(priority, 0) if self.waiting is not None else 0


def divide_slots(slot_count: int, demands: Mapping[Router, RouterDemand]) -> dict[Router, int]:
    """The tasks that each router may have on the worker, waiting for a slot or running. At least 1.

    A router that has reported no demand has an equal share, and while no task waits anywhere, all have. Otherwise the
    others divide the rest. Each of them gets at least the whole part of its share by weight, but no more than it wants,
    or 1. The latter lets a router that was idle start a task at once.
    """
    if not demands:
        return {}
    equal = max(1, slot_count // len(demands))
    known = {name: demand for name, demand in demands.items() if demand.waiting is not None}
    weights = _weights(known)
    if not any(weights.values()):
        return dict.fromkeys(demands, equal)
    left = max(0, slot_count - equal * (len(demands) - len(known)))
    return {**dict.fromkeys(demands, equal), **_divide_by_weight(left, known, weights)}


def _divide_by_weight(
    slot_count: int, demands: Mapping[Router, RouterDemand], weights: Mapping[Router, float]
) -> dict[Router, int]:
    shares = dict.fromkeys(demands, 0)
    # D'Hondt's method: the next slot goes to the router with the largest weight for each slot that it would have.
    order = [(-weight, name) for name, weight in weights.items() if weight and demands[name].wanted]
    heapq.heapify(order)
    for _ in range(slot_count):
        if not order:
            break
        _, name = heapq.heappop(order)
        shares[name] += 1
        if shares[name] < demands[name].wanted:
            heapq.heappush(order, (-weights[name] / (shares[name] + 1), name))
    left = slot_count - sum(shares.values())
    return {name: max(1, share + left // len(shares)) for name, share in shares.items()}


def _weights(demands: Mapping[Router, RouterDemand]) -> dict[Router, float]:
    """The part of each router in the waiting tasks, with classes by their weights. The sum is 1, or 0 without tasks."""
    totals = {
        priority: sum(demand.count(priority) for demand in demands.values())
        for priority in Priority
    }
    all_weights = sum(priority.weight for priority, total in totals.items() if total)
    return {
        name: sum(
            priority.weight / all_weights * demand.count(priority) / total
            for priority, total in totals.items()
            if total
        )
        for name, demand in demands.items()
    }
