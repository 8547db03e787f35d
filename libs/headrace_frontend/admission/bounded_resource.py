"""A fair pool with bounded waits. It estimates when a refused request should be sent again."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, HeadraceError, QueueFull
from headrace_frontend.admission.fair_share import CapacityRequest, FairPool, Grant
from headrace_frontend.tenants import DEFAULT_TENANT

_REMEDIES: Final = {
    "requests": "the router's max_concurrent_requests bounds them",
    "tokens": "the router's max_queued_tokens bounds them",
    "images": "the router's images_mib bounds them",
    "blocks": "add decode workers, or set the admission_wait_s of this one to 0 to wait until the deadline",
    "slots": "add decode workers, or set the router's admission_wait_s to 0 to wait until the deadline",
}
"""What an operator can do, by the name of the resource."""
_RETRY_MIN_S: Final = 0.05
_RETRY_MAX_S: Final = 60.0
_RETRY_UNKNOWN_S: Final = 0.5
# The weight of the latest hold time in the mean.
_LATEST_WEIGHT: Final = 0.1


class BoundedResource:
    """One fair pool with bounded waits. Measures how long its units are held."""

    def __init__(self, name: str, unit: str, pool: FairPool, wait_s: float) -> None:
        self.pool = pool
        self._name = name
        self._unit = unit
        self._wait_s = wait_s
        self._mean_hold_s = 0.0

    async def acquire(
        self,
        tenant: str,
        amount: int,
        deadline: Deadline,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        """Raises QueueFull, or DeadlineExceeded when the deadline bounds the wait."""
        granted = asyncio.Event()
        request = CapacityRequest(tenant, amount, granted.set, priority)
        grant = self.pool.acquire(request)
        if grant is Grant.REJECTED:
            raise self._full_error(tenant, amount, priority)
        if grant is Grant.GRANTED:
            return
        try:
            in_time = await self._wait_granted(granted, request, deadline)
        except asyncio.CancelledError:
            if not self.pool.cancel(request):
                self.pool.release(tenant, amount, priority)
            raise
        if not in_time and self.pool.cancel(request):
            raise self._timeout_error(request, deadline)

    async def _wait_granted(
        self, granted: asyncio.Event, request: CapacityRequest, deadline: Deadline
    ) -> bool:
        """False when the wait has ended first. A request that is within the share by then waits on."""
        bound = Deadline.after(self._wait_s)
        while not granted.is_set():
            within = self.pool.within_share(request)
            left_s = min(deadline.remaining_s(), math.inf if within else bound.remaining_s())
            if left_s <= 0:
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await granted.wait()
        return True

    @asynccontextmanager
    async def holding(
        self,
        tenant: str,
        amount: int,
        deadline: Deadline,
        priority: Priority = Priority.NORMAL,
    ) -> AsyncIterator[None]:
        """Units over the block. Raises as `acquire` does."""
        await self.acquire(tenant, amount, deadline, priority)
        acquired_s = time.monotonic()
        try:
            yield
        finally:
            self.release(tenant, amount, time.monotonic() - acquired_s, priority)

    def release(
        self, tenant: str, amount: int, held_s: float, priority: Priority = Priority.NORMAL
    ) -> None:
        """Returns units that were held for `held_s`."""
        weight = _LATEST_WEIGHT if self._mean_hold_s else 1.0
        self._mean_hold_s += weight * (held_s - self._mean_hold_s)
        self.pool.release(tenant, amount, priority)

    def reject_if_full(self, tenant: str, priority: Priority = Priority.NORMAL) -> None:
        """Raises QueueFull when the resource is full and the tenant is at its share: no amount would be granted."""
        full = self.pool.used >= self.pool.capacity
        if full and self.pool.used_by(tenant, priority) >= self.pool.share(tenant, priority):
            raise self._full_error(tenant, 1, priority)

    def expected_wait_s(self, tenant: str, priority: Priority = Priority.NORMAL) -> float:
        """How long one more unit of a tenant takes: held units are released evenly over the mean hold time.

        0 when one is free, and before the first was released.
        """
        ahead = self.pool.units_ahead(tenant, priority)
        return self._mean_hold_s * ahead / max(1, self.pool.capacity)

    def wait_of_holder_s(self, tenant: str, priority: Priority = Priority.NORMAL) -> float:
        """How long a tenant may wait for the use of a unit that was granted to it."""
        share = self.pool.share(tenant, priority)
        within = self.pool.used_by(tenant, priority) <= max(1.0, share)
        return math.inf if within else self._wait_s

    def _timeout_error(self, request: CapacityRequest, deadline: Deadline) -> HeadraceError:
        if not deadline.expired:
            return self._full_error(request.tenant, request.amount, request.priority)
        what = f"room for {request.amount} {self._unit}"
        return DeadlineExceeded(
            f"the deadline passed while waiting for {what}", metadata={"waited_for": what}
        )

    def _full_error(self, tenant: str, amount: int, priority: Priority) -> QueueFull:
        pool = self.pool
        used, share = pool.used_by(tenant, priority), pool.share(tenant, priority)
        detail = f"{pool.used} of {pool.capacity} {self._unit} are in use"
        remedy = _REMEDIES[self._name]
        if tenant != DEFAULT_TENANT:
            detail += f", {used} of them by tenant {tenant} with a share of {share:.0f}"
        return QueueFull(
            f"{detail}; {remedy}",
            metadata={
                "queue": self._name,
                "maxsize": str(pool.capacity),
                "used": str(pool.used),
                "tenant": tenant,
                "tenant_used": str(used),
                "tenant_share": f"{share:.0f}",
                "priority": priority.label,
            },
            retry_after_s=self._retry_after_s(used, share, amount),
        )

    def _retry_after_s(self, used: int, share: float, amount: int) -> float:
        """When the missing units are likely to be free: held units are released evenly over the mean hold time."""
        if not self._mean_hold_s:
            return _RETRY_UNKNOWN_S
        over_share = max(0.0, used + amount - share)
        over_all = max(0, self.pool.used + amount - self.pool.capacity)
        own_s = self._mean_hold_s * over_share / used if used else 0.0
        all_s = self._mean_hold_s * over_all / max(1, self.pool.used)
        return min(_RETRY_MAX_S, max(_RETRY_MIN_S, min(own_s, self._mean_hold_s), all_s))
