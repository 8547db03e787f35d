"""Admission control: bounds on requests and on queued prompt tokens, fair among tenants.

A request is rejected before any work is done for it. The error contains a retry delay, estimated from how fast requests
end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, HeadraceError, InvalidRequest, QueueFull
from headrace_router.admission.fair_share import CapacityRequest, FairPool, Grant
from headrace_router.admission.tenants import DEFAULT_TENANT

_RETRY_MIN_S: Final = 0.05
_RETRY_MAX_S: Final = 60.0
_RETRY_UNKNOWN_S: Final = 0.5
# The weight of the latest hold time in the mean.
_LATEST_WEIGHT: Final = 0.1


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`max_queued_tokens` bounds the prompt tokens of requests before their first token. `wait_s` bounds how long a
    request of a tenant below its share waits.
    """

    max_num_seqs: int
    max_queued_tokens: int
    wait_s: float


class _BoundedResource:
    """One fair pool with bounded waits. Measures how long its units are held."""

    def __init__(self, name: str, unit: str, pool: FairPool, wait_s: float) -> None:
        self.pool = pool
        self._name = name
        self._unit = unit
        self._wait_s = wait_s
        self._mean_hold_s = 0.0

    async def acquire(self, tenant: str, amount: int, deadline: Deadline) -> None:
        """Raises QueueFull, or DeadlineExceeded when the deadline bounds the wait."""
        granted = asyncio.Event()
        request = CapacityRequest(tenant, amount, granted.set)
        grant = self.pool.acquire(request)
        if grant is Grant.REJECTED:
            raise self._full_error(tenant, amount)
        if grant is Grant.GRANTED:
            return
        wait_s = min(self._wait_s, deadline.remaining_s())
        try:
            async with asyncio.timeout(wait_s):
                await granted.wait()
        except TimeoutError:
            if self.pool.cancel(request):
                raise self._timeout_error(tenant, amount, wait_s) from None
        except asyncio.CancelledError:
            if not self.pool.cancel(request):
                self.pool.release(tenant, amount)
            raise

    def release(self, tenant: str, amount: int, held_s: float) -> None:
        weight = _LATEST_WEIGHT if self._mean_hold_s else 1.0
        self._mean_hold_s += weight * (held_s - self._mean_hold_s)
        self.pool.release(tenant, amount)

    def reject_if_full(self, tenant: str) -> None:
        """Raises QueueFull when the resource is full and the tenant is at its share: no amount would be granted."""
        full = self.pool.used >= self.pool.capacity
        if full and self.pool.used_by(tenant) >= self.pool.share(tenant):
            raise self._full_error(tenant, 1)

    def _timeout_error(self, tenant: str, amount: int, waited_s: float) -> HeadraceError:
        if waited_s >= self._wait_s:
            return self._full_error(tenant, amount)
        what = f"room for {amount} {self._unit}"
        return DeadlineExceeded(
            f"the deadline passed while waiting for {what}", metadata={"waited_for": what}
        )

    def _full_error(self, tenant: str, amount: int) -> QueueFull:
        pool = self.pool
        used, share = pool.used_by(tenant), pool.share(tenant)
        detail = f"{pool.used} of {pool.capacity} {self._unit} are in use"
        if tenant != DEFAULT_TENANT:
            detail += f", {used} of them by tenant {tenant} with a share of {share:.0f}"
        return QueueFull(
            detail,
            metadata={
                "queue": self._name,
                "maxsize": str(pool.capacity),
                "used": str(pool.used),
                "tenant": tenant,
                "tenant_used": str(used),
                "tenant_share": f"{share:.0f}",
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


class AdmissionPermit:
    """One admitted request."""

    def __init__(self, tenant: str, tokens: _BoundedResource, deadline: Deadline) -> None:
        self.tenant = tenant
        self._resource = tokens
        self._deadline = deadline
        self._tokens = 0
        self._acquired_s = 0.0

    async def acquire_tokens(self, count: int) -> None:
        """Admits the prompt to the queue of prompts that wait for their prefill.

        Raises QueueFull, DeadlineExceeded, or InvalidRequest for a prompt beyond the bound.
        """
        if count > self._resource.pool.capacity:
            raise InvalidRequest(
                {
                    "prompt": f"has {count} tokens, and this router queues at most "
                    f"{self._resource.pool.capacity}; shorten it"
                }
            )
        await self._resource.acquire(self.tenant, count, self._deadline)
        self._tokens, self._acquired_s = count, time.monotonic()

    def release_tokens(self) -> None:
        """The prompt no longer waits. Repeats are ignored."""
        if self._tokens:
            tokens, self._tokens = self._tokens, 0
            self._resource.release(self.tenant, tokens, time.monotonic() - self._acquired_s)


class Admission:
    """Admits requests. One event loop owns it."""

    def __init__(self, limits: AdmissionLimits, weights: Callable[[], Mapping[str, float]]) -> None:
        self._requests = _BoundedResource(
            "requests", "requests", FairPool(limits.max_num_seqs, weights), limits.wait_s
        )
        self._tokens = _BoundedResource(
            "tokens", "queued tokens", FairPool(limits.max_queued_tokens, weights), limits.wait_s
        )

    @property
    def max_num_seqs(self) -> int:
        """The bound on admitted requests."""
        return self._requests.pool.capacity

    @property
    def max_queued_tokens(self) -> int:
        """The bound on prompt tokens of requests before their first token."""
        return self._tokens.pool.capacity

    @property
    def requests(self) -> int:
        """The number of admitted requests."""
        return self._requests.pool.used

    @property
    def waiting(self) -> int:
        """The number of requests that wait for admission."""
        return self._requests.pool.waiting + self._tokens.pool.waiting

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of requests before their first token."""
        return self._tokens.pool.used

    async def admit(self, tenant: str, deadline: Deadline) -> AdmissionPermit:
        """Admits a request, at once or after a bounded wait. The permit must be released.

        Raises QueueFull with a retry delay, or DeadlineExceeded.
        """
        self._tokens.reject_if_full(tenant)
        await self._requests.acquire(tenant, 1, deadline)
        return AdmissionPermit(tenant, self._tokens, deadline)

    def release(self, permit: AdmissionPermit, held_s: float) -> None:
        """The request has ended after `held_s`."""
        permit.release_tokens()
        self._requests.release(permit.tenant, 1, held_s)

    @contextmanager
    def holding(self, permit: AdmissionPermit) -> Iterator[AdmissionPermit]:
        """Releases the permit at the end of the block."""
        entered_s = time.monotonic()
        try:
            yield permit
        finally:
            self.release(permit, time.monotonic() - entered_s)
