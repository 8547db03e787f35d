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

    @property
    def claimant(self) -> Claimant:
        """The tenant and the class that the units count for."""
        return self.tenant, self.priority


@dataclass(slots=True)
class _Tenant:
    used: int = 0
    waiting: int = 0
    """Units that `requests` ask for."""
    requests: OrderedDict[CapacityRequest, None] = field(default_factory=OrderedDict)
    """Waiting requests, oldest first."""

    @property
    def idle(self) -> bool:
        return not self.used and not self.requests

    def use(self, amount: int) -> None:
        self.used += amount

    def add_waiting(self, request: CapacityRequest) -> None:
        self.requests[request] = None
        self.waiting += request.amount

    def remove_waiting(self, request: CapacityRequest) -> None:
        del self.requests[request]
        self.waiting -= request.amount


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
    _tenants: dict[Claimant, _Tenant] = field(default_factory=dict, init=False)

    @property
    def usable(self) -> float:
        """Units that may be used now."""
        return min(self.capacity, self.limit)

    def used_by(self, tenant: str, priority: Priority = Priority.NORMAL) -> int:
        """Units that a tenant uses in a class."""
        entry = self._tenants.get((tenant, priority))
        return entry.used if entry is not None else 0

    def share(self, tenant: str, priority: Priority = Priority.NORMAL) -> float:
        """Units that a tenant may use in a class while there is not enough for all."""
        weights, claimant = self.weights(), (tenant, priority)
        total = sum(_weight(weights, name) for name in self._tenants.keys() | {claimant})
        return self.usable * _weight(weights, claimant) / total

    def take(self, tenant: str, amount: int, priority: Priority = Priority.NORMAL) -> bool:
        """Grants units at once. False when they are not free, or others wait."""
        if self.waiting or self.used + amount > self.usable:
            return False
        self._use((tenant, priority), amount)
        return True

    def acquire(self, request: CapacityRequest) -> Grant:
        """Grants the request, lets it wait, or rejects it. More than the capacity is always rejected."""
        if request.amount > self.capacity:
            return Grant.REJECTED
        if self.take(request.tenant, request.amount, request.priority):
            return Grant.GRANTED
        entry = self._tenants.get(request.claimant)
        wanted = entry.used + entry.waiting if entry is not None else 0
        if not self.queue_above_share and self._exceeds_share(request, wanted):
            return Grant.REJECTED
        self._tenants.setdefault(request.claimant, _Tenant()).add_waiting(request)
        self.waiting += 1
        return Grant.WAITING

    def units_ahead(self, tenant: str, priority: Priority = Priority.NORMAL) -> float:
        """Units that are granted before one more of a tenant that asks for it now, this one included.

        0 when it would be granted at once. The others get their shares meanwhile.
        """
        if self.used < self.usable and not self.waiting:
            return 0.0
        weights, claimant = self.weights(), (tenant, priority)
        entry = self._tenants.get(claimant)
        own = 1 + (entry.waiting if entry is not None else 0)
        per_weight = own / _weight(weights, claimant)
        others = sum(
            min(other.waiting, per_weight * _weight(weights, name))
            for name, other in self._tenants.items()
            if name != claimant
        )
        return max(0, self.used - self.usable) + own + others

    def resize(self, capacity: int) -> None:
        """Changes the capacity, and grants waiting requests that fit now. Granted units stay granted."""
        self.capacity = capacity
        self._grant_waiting()

    def requeue(self, request: CapacityRequest) -> None:
        """A request for which there was no use gives back its units, and waits before the others of its tenant.

        No more units are used than by the others, until `raise_limit`.
        """
        entry = self._tenants[request.claimant]
        entry.use(-request.amount)
        self.used -= request.amount
        self.limit = self.used
        entry.add_waiting(request)
        entry.requests.move_to_end(request, last=False)
        self.waiting += 1

    def raise_limit(self, units: int) -> bool:
        """Lets more units be used. False when all may be."""
        self.limit += units
        if self.limit >= self.capacity:
            self.limit = math.inf
        self._grant_waiting()
        return self.limit < self.capacity

    def within_share(self, request: CapacityRequest) -> bool:
        """Whether a waiting request, after the earlier ones of its tenant, fits the tenant's share."""
        entry = self._tenants[request.claimant]
        wanted = entry.used
        for earlier in entry.requests:
            if earlier is request:
                break
            wanted += earlier.amount
        return not self._exceeds_share(request, wanted)

    def release(self, tenant: str, amount: int, priority: Priority = Priority.NORMAL) -> None:
        """Returns granted units, and grants waiting requests that fit now."""
        claimant = (tenant, priority)
        self._tenants[claimant].use(-amount)
        self.used -= amount
        self._remove_if_idle(claimant)
        if self.waiting:
            self._grant_waiting()

    def cancel(self, request: CapacityRequest) -> bool:
        """Removes a waiting request. False when it was granted already."""
        entry = self._tenants.get(request.claimant)
        if entry is None or request not in entry.requests:
            return False
        self._stop_waiting(request)
        self._remove_if_idle(request.claimant)
        self._grant_waiting()
        return True

    def _exceeds_share(self, request: CapacityRequest, wanted: int) -> bool:
        """Whether the request exceeds its tenant's share beside `wanted` units. The first request never does."""
        share = self.share(*request.claimant)
        return bool(wanted) and wanted + request.amount > share + _ROUNDING

    def _grant_waiting(self) -> None:
        weights = self.weights()
        while (name := self._next_tenant(weights)) is not None:
            entry = self._tenants[name]
            request = next(iter(entry.requests))
            if self.used + request.amount > self.usable:
                # No request overtakes it: else large requests would wait forever.
                return
            self._stop_waiting(request)
            self._use(request.claimant, request.amount)
            request.on_granted()

    def _next_tenant(self, weights: Mapping[str, float]) -> Claimant | None:
        """A waiting tenant that has no units, or else the one with the least for its weight.

        Of equals, the one of the higher class, then the first.
        """
        if not self.waiting:
            return None
        waiting = (name for name, entry in self._tenants.items() if entry.requests)
        return min(waiting, key=lambda name: self._precedence(name, weights))

    def _precedence(
        self, name: Claimant, weights: Mapping[str, float]
    ) -> tuple[bool, float, Priority]:
        entry, (_, priority) = self._tenants[name], name
        if not entry.used:
            return False, 0.0, priority
        first = next(iter(entry.requests))
        return True, (entry.used + first.amount) / _weight(weights, name), priority

    def _use(self, claimant: Claimant, amount: int) -> None:
        entry = self._tenants.get(claimant)
        if entry is None:
            entry = self._tenants[claimant] = _Tenant()
        entry.use(amount)
        self.used += amount

    def _stop_waiting(self, request: CapacityRequest) -> None:
        self._tenants[request.claimant].remove_waiting(request)
        self.waiting -= 1

    def _remove_if_idle(self, name: Claimant) -> None:
        if self._tenants[name].idle:
            del self._tenants[name]


def tenant_weight(weights: Mapping[str, float], tenant: str) -> float:
    """The weight of a tenant, 1 without an entry."""
    return weights.get(tenant, _WEIGHT_DEFAULT)


def _weight(weights: Mapping[str, float], claimant: Claimant) -> float:
    tenant, priority = claimant
    return tenant_weight(weights, tenant) * priority.weight
