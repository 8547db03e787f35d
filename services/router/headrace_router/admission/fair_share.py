"""A bounded resource shared by tenants. Pure: who gets in, who may wait, who is refused.

While there is enough for all, everybody gets what they ask for. Once there is not, a tenant may use its share: the
capacity, split by weight among the tenants that use or want some of it. A tenant at its share is refused; one below it
waits, and what is given back goes to a waiting tenant that has nothing, or else to the one that has least for its
weight. So shares converge to the weights as fast as requests end, nobody starves, and what nobody else wants is free
for all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

_WEIGHT_DEFAULT: Final = 1.0
_ROUNDING: Final = 1e-9


class Grant(Enum):
    """What a tenant that asks is told."""

    TAKEN = "taken"
    WAITING = "waiting"
    REFUSED = "refused"


@dataclass(eq=False, slots=True)
class CapacityRequest:
    """What one request asks for. `on_granted` is called when it got it after having waited."""

    tenant: str
    amount: int
    on_granted: Callable[[], None]


@dataclass(slots=True)
class _Tenant:
    used: int = 0
    waiting: int = 0
    claims: OrderedDict[CapacityRequest, None] = field(default_factory=OrderedDict)


class FairPool:
    """`capacity` units. `weights` says what the tenants weigh now; one that it does not name weighs 1."""

    def __init__(self, capacity: int, weights: Callable[[], Mapping[str, float]]) -> None:
        self.capacity = capacity
        self.used = 0
        self.waiting = 0
        """Claims that wait."""
        self._weights = weights
        self._tenants: dict[str, _Tenant] = {}

    def used_by(self, tenant: str) -> int:
        """Units that a tenant has."""
        entry = self._tenants.get(tenant)
        return entry.used if entry is not None else 0

    def share(self, tenant: str) -> float:
        """Units that a tenant may use when there is not enough for all."""
        weights = self._weights()
        total = sum(_weight(weights, name) for name in self._tenants.keys() | {tenant})
        return self.capacity * _weight(weights, tenant) / total

    def ask(self, claim: CapacityRequest) -> Grant:
        """Takes what is asked for, lets the claim wait, or refuses it. More than the capacity is always refused."""
        if claim.amount > self.capacity:
            return Grant.REFUSED
        if self.used + claim.amount <= self.capacity and not self.waiting:
            self._take(claim)
            return Grant.TAKEN
        entry = self._tenants.get(claim.tenant)
        wanted = entry.used + entry.waiting if entry is not None else 0
        if wanted and wanted + claim.amount > self.share(claim.tenant) + _ROUNDING:
            return Grant.REFUSED
        entry = self._tenants.setdefault(claim.tenant, _Tenant())
        entry.claims[claim] = None
        self.waiting += 1
        entry.waiting += claim.amount
        return Grant.WAITING

    def give_back(self, tenant: str, amount: int) -> None:
        """Returns what was taken; claims that wait get it."""
        entry = self._tenants[tenant]
        entry.used -= amount
        self.used -= amount
        self._forget_if_idle(tenant)
        self._grant()

    def withdraw(self, claim: CapacityRequest) -> bool:
        """A claim waits no more; False when it does not wait, because it was granted."""
        entry = self._tenants.get(claim.tenant)
        if entry is None or claim not in entry.claims:
            return False
        self._drop(entry, claim)
        self._forget_if_idle(claim.tenant)
        self._grant()
        return True

    def _grant(self) -> None:
        weights = self._weights()
        while (name := self._next_tenant(weights)) is not None:
            entry = self._tenants[name]
            claim = next(iter(entry.claims))
            if self.used + claim.amount > self.capacity:
                # Nobody overtakes it, or large claims would wait for good.
                return
            self._drop(entry, claim)
            self._take(claim)
            claim.on_granted()

    def _next_tenant(self, weights: Mapping[str, float]) -> str | None:
        """A waiting tenant that has nothing, or else the one with least for its weight; of equals, the first."""
        if not self.waiting:
            return None
        waiting = (name for name, entry in self._tenants.items() if entry.claims)
        return min(waiting, key=lambda name: self._precedence(name, weights))

    def _precedence(self, name: str, weights: Mapping[str, float]) -> tuple[bool, float]:
        entry = self._tenants[name]
        if not entry.used:
            return False, 0.0
        first = next(iter(entry.claims))
        return True, (entry.used + first.amount) / _weight(weights, name)

    def _take(self, claim: CapacityRequest) -> None:
        self._tenants.setdefault(claim.tenant, _Tenant()).used += claim.amount
        self.used += claim.amount

    def _drop(self, entry: _Tenant, claim: CapacityRequest) -> None:
        del entry.claims[claim]
        self.waiting -= 1
        entry.waiting -= claim.amount

    def _forget_if_idle(self, name: str) -> None:
        entry = self._tenants[name]
        if not entry.used and not entry.claims:
            del self._tenants[name]


def _weight(weights: Mapping[str, float], tenant: str) -> float:
    return weights.get(tenant, _WEIGHT_DEFAULT)
