"""A bounded resource shared by tenants. Pure: it decides which requests are granted, wait, or are rejected.

While there is enough capacity, every request is granted. Otherwise each tenant may use its share: the capacity, split
by weight among the tenants that use or want some of it. A tenant below its share waits. One at its share is rejected,
or waits behind all tenants below theirs if the pool has `queue_above_share`.

Released units go to a waiting tenant that has none, or else to the one with the least for its weight. So shares
converge to the weights as fast as requests end, and no tenant starves. A tenant may exceed its share while the others
want less than theirs.

The requests of a tenant in one class count as a tenant of their own. Its weight is that of the tenant times that of the
class. So no class of a tenant starves either.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from headrace_common.callers.priority import Priority

_WEIGHT_DEFAULT: Final = 1.0
_ROUNDING: Final = 1e-9

Claimant: TypeAlias = tuple[str, Priority]
"""A tenant, and the class of some of its requests."""
Watcher: TypeAlias = Callable[[str, str, Priority, int, int, bool, tuple[int, ...]], None]
"""Gets each call: the name of the method, the tenant, the class, the amount, the number of a request that may wait, and
the result. Then the numbers of the requests that got units after a wait.
"""


class Grant(Enum):
    """What becomes of a request."""

    GRANTED = "granted"
    WAITING = "waiting"
    REJECTED = "rejected"


@dataclass(eq=False, slots=True)
class CapacityRequest:
    """Units that a tenant asks for. The pool calls `on_granted` when it grants them after a wait."""

    tenant: str
    amount: int
    on_granted: Callable[[], None]
    priority: Priority = Priority.NORMAL
    number: int = 0
    """Given by the pool to each that waits."""

    @property
    def claimant(self) -> Claimant:
        """The tenant and the class that the units count for."""
        return self.tenant, self.priority


@dataclass(slots=True)
class _Queue:
    """The requests of a claimant that wait, oldest first, and the units that they ask for."""

    requests: OrderedDict[CapacityRequest, None] = field(default_factory=OrderedDict)
    units: int = 0

    def add(self, request: CapacityRequest) -> None:
        self.requests[request] = None
        self.units += request.amount

    def remove(self, request: CapacityRequest) -> None:
        del self.requests[request]
        self.units -= request.amount


@dataclass(eq=False, slots=True)
class FairPool:
    """Shares `capacity` units. `weights` returns the current weights; a tenant without one weighs 1."""

    capacity: int
    weights: Callable[[], Mapping[str, float]]
    _: KW_ONLY
    queue_above_share: bool = False
    limit: float = field(default=math.inf, init=False)
    """Units that may be used until `raise_limit`, where that is less than the capacity."""
    used: int = field(default=0, init=False)
    waiting: int = field(default=0, init=False)
    """The number of requests that wait."""
    _watcher: Watcher = field(default=lambda *_: None, init=False)
    _number: int = field(default=0, init=False)
    """Of the last request that has waited."""
    parts: dict[Claimant, int] = field(default_factory=dict, init=False)
    """The units that each claimant uses."""
    _queues: dict[Claimant, _Queue] = field(default_factory=dict, init=False)

    @property
    def usable(self) -> float:
        """Units that may be used now."""
        return min(self.capacity, self.limit)

    def watch(self, watcher: Watcher) -> None:
        """`watcher` gets every call from now on."""
        self._watcher = watcher

    def used_by(self, tenant: str, priority: Priority = Priority.NORMAL) -> int:
        """Units that a tenant uses in a class."""
        return self.parts.get((tenant, priority), 0)

    def used_in(self, priority: Priority) -> int:
        """Units that all tenants use in a class."""
        return sum(used for (_, one), used in self.parts.items() if one is priority)

    def share(self, tenant: str, priority: Priority = Priority.NORMAL) -> float:
        """Units that a tenant may use in a class while there is not enough for all."""
        weights, claimant = self.weights(), (tenant, priority)
        claimants = self.parts.keys() | self._queues.keys() | {claimant}
        total = sum(_weight(weights, name) for name in claimants)
        return self.usable * _weight(weights, claimant) / total

    def take(self, tenant: str, amount: int, priority: Priority = Priority.NORMAL) -> bool:
        """Grants units at once. False when they are not free, or others wait."""
        used = self.used + amount
        fits = not (self.waiting or used > self.capacity or used > self.limit)
        if fits:
            claimant = tenant, priority
            self.parts[claimant] = self.parts.get(claimant, 0) + amount
            self.used = used
        self._watcher("take", tenant, priority, amount, 0, fits, ())
        return fits

    def acquire(self, request: CapacityRequest) -> Grant:
        """Grants the request, lets it wait, or rejects it. More than the capacity is always rejected."""
        fits = request.amount <= self.capacity
        if fits and self.take(request.tenant, request.amount, request.priority):
            return Grant.GRANTED
        claimant = request.claimant
        queue = self._queues.get(claimant)
        wanted = self.parts.get(claimant, 0) + (queue.units if queue is not None else 0)
        waits = fits and (self.queue_above_share or not self._exceeds_share(request, wanted))
        if waits:
            self._wait(request)
        self._watcher("acquire", *claimant, request.amount, request.number, waits, ())
        return Grant.WAITING if waits else Grant.REJECTED

    def _wait(self, request: CapacityRequest) -> _Queue:
        self.waiting += 1
        self._number = request.number = self._number + 1
        queue = self._queues.setdefault(request.claimant, _Queue())
        queue.add(request)
        return queue

    def units_ahead(self, tenant: str, priority: Priority = Priority.NORMAL) -> float:
        """Units that are granted before one more of a tenant that asks for it now, this one included.

        0 when it would be granted at once. The others get their shares meanwhile.
        """
        if self.used < self.capacity and self.used < self.limit and not self.waiting:
            return 0.0
        weights, claimant = self.weights(), (tenant, priority)
        queue = self._queues.get(claimant)
        own = 1 + (queue.units if queue is not None else 0)
        per_weight = own / _weight(weights, claimant)
        others = sum(
            min(other.units, per_weight * _weight(weights, name))
            for name, other in self._queues.items()
            if name != claimant
        )
        return max(0, self.used - self.usable) + own + others

    def resize(self, capacity: int) -> None:
        """Changes the capacity, and grants waiting requests that fit now. Granted units stay granted."""
        self.capacity = capacity
        granted = self._grant_waiting()
        self._watcher("resize", "", Priority.NORMAL, capacity, 0, False, granted)

    def requeue(self, request: CapacityRequest) -> None:
        """A request for which there was no use gives back its units, and waits before the others of its tenant.

        No more units are used than by the others, until `raise_limit`.
        """
        self._give_back(request.claimant, request.amount)
        self.limit = self.used
        self._wait(request).requests.move_to_end(request, last=False)
        self._watcher("requeue", *request.claimant, request.amount, request.number, True, ())

    def raise_limit(self, units: int) -> bool:
        """Lets more units be used. False when all may be."""
        self.limit += units
        if self.limit >= self.capacity:
            self.limit = math.inf
        granted, limited = self._grant_waiting(), self.limit < self.capacity
        self._watcher("raise_limit", "", Priority.NORMAL, units, 0, limited, granted)
        return limited

    def within_share(self, request: CapacityRequest) -> bool:
        """Whether a waiting request, after the earlier ones of its tenant, fits the tenant's share."""
        wanted = self.parts.get(request.claimant, 0)
        for earlier in self._queues[request.claimant].requests:
            if earlier is request:
                break
            wanted += earlier.amount
        return not self._exceeds_share(request, wanted)

    def release(self, tenant: str, amount: int, priority: Priority = Priority.NORMAL) -> None:
        """Returns granted units, and grants waiting requests that fit now."""
        self._give_back((tenant, priority), amount)
        granted = self._grant_waiting() if self.waiting else ()
        self._watcher("release", tenant, priority, amount, 0, False, granted)

    def _give_back(self, claimant: Claimant, amount: int) -> None:
        left = self.parts[claimant] - amount
        if left:
            self.parts[claimant] = left
        else:
            del self.parts[claimant]
        self.used -= amount

    def cancel(self, request: CapacityRequest) -> bool:
        """Removes a waiting request. False when it was granted already."""
        queue = self._queues.get(request.claimant)
        if queue is None or request not in queue.requests:
            return False
        self._stop_waiting(queue, request)
        granted = self._grant_waiting()
        self._watcher("cancel", *request.claimant, request.amount, request.number, True, granted)
        return True

    def _exceeds_share(self, request: CapacityRequest, wanted: int) -> bool:
        """Whether the request exceeds its tenant's share beside `wanted` units. The first request never does."""
        share = self.share(*request.claimant)
        return bool(wanted) and wanted + request.amount > share + _ROUNDING

    def _grant_waiting(self) -> tuple[int, ...]:
        """The numbers of the requests that get units."""
        weights, granted = self.weights(), list[int]()
        while self._queues:
            name = min(self._queues, key=lambda one: self._precedence(one, weights))
            queue = self._queues[name]
            request = next(iter(queue.requests))
            if self.used + request.amount > self.usable:
                # No request overtakes it: else large requests would wait forever.
                break
            self._stop_waiting(queue, request)
            self.parts[name] = self.parts.get(name, 0) + request.amount
            self.used += request.amount
            granted.append(request.number)
            request.on_granted()
        return tuple(granted)

    def _precedence(
        self, name: Claimant, weights: Mapping[str, float]
    ) -> tuple[bool, float, Priority]:
        """The least is next: one without units, or else the one with the least for its weight, by class of equals."""
        used, (_, priority) = self.parts.get(name, 0), name
        if not used:
            return False, 0.0, priority
        first = next(iter(self._queues[name].requests))
        return True, (used + first.amount) / _weight(weights, name), priority

    def _stop_waiting(self, queue: _Queue, request: CapacityRequest) -> None:
        queue.remove(request)
        self.waiting -= 1
        if not queue.requests:
            del self._queues[request.claimant]


def tenant_weight(weights: Mapping[str, float], tenant: str) -> float:
    """The weight of a tenant, 1 without an entry."""
    return weights.get(tenant, _WEIGHT_DEFAULT)


def _weight(weights: Mapping[str, float], claimant: Claimant) -> float:
    tenant, priority = claimant
    return tenant_weight(weights, tenant) * priority.weight
