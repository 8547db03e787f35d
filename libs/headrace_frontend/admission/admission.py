"""Admission control: bounds on requests, on queued prompt tokens and on slots of decode workers, fair among tenants.

A request occupies a place of the process first. Beyond a tenant's share of the places it is rejected before any work is
done for it. Then its prompt counts as queued, and at last it gets a slot of its model's decode workers. For a slot,
requests wait here and not at the engines, because these serve in the order of arrival. The error of a rejection
contains a retry delay, estimated from how fast requests end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, HeadraceError, InvalidRequest, QueueFull
from headrace_common.tasks import wait_briefly
from headrace_frontend.admission.fair_share import CapacityRequest, FairPool, Grant
from headrace_frontend.tenants import DEFAULT_TENANT

_REMEDIES: Final = {
    "requests": "the router's max_concurrent_requests bounds them",
    "tokens": "the router's max_concurrent_requests bounds them",
    "images": "add routers, or send smaller images",
    "blocks": "add decode workers, or set the admission_wait_s of this one to 0 to wait until the deadline",
    "slots": "add decode workers, or set the router's admission_wait_s to 0 to wait until the deadline",
}
"""What an operator can do, by the name of the resource."""
IMAGES_MIB: Final = 512
"""Of images in requests that have not ended, before more are rejected."""
_RETRY_MIN_S: Final = 0.05
_RETRY_MAX_S: Final = 60.0
_RETRY_UNKNOWN_S: Final = 0.5
# The weight of the latest hold time in the mean.
_LATEST_WEIGHT: Final = 0.1
# Blocks of a worker become free by other routers' requests too, of which this one gets no notice.
_PROBE_S: Final = 0.05
_PROBE_MAX_S: Final = 0.4


class BoundedResource:
    """One fair pool with bounded waits. Measures how long its units are held."""

    def __init__(self, name: str, unit: str, pool: FairPool, wait_s: float) -> None:
        self.pool = pool
        self._name = name
        self._unit = unit
        self._wait_s = wait_s
        self._mean_hold_s = 0.0
        self._probe: asyncio.TimerHandle | None = None
        self._probe_units, self._probe_s = 1, _PROBE_S
        self._fits = False
        """Whether no request has waited again since the last probe."""

    async def acquire(
        self,
        tenant: str,
        amount: int,
        deadline: Deadline,
        priority: Priority = Priority.NORMAL,
    ) -> Held:
        """The caller must close what it gets.

        Raises QueueFull, or DeadlineExceeded when the deadline bounds the wait.
        """
        if self.pool.take(tenant, amount, priority):
            return Held(self, tenant, amount, priority)
        granted = asyncio.Event()
        request = CapacityRequest(tenant, amount, granted.set, priority)
        grant = self.pool.acquire(request)
        if grant is Grant.REJECTED:
            raise self._full_error(tenant, amount, priority)
        if grant is Grant.WAITING:
            await self._wait(granted, request, deadline, self.wait_bound())
        return Held(self, tenant, amount, priority)

    def wait_bound(self) -> Deadline:
        """The end of a wait beyond the tenant's share that begins now."""
        return Deadline.after(self._wait_s)

    async def wait_again(
        self, tenant: str, amount: int, deadline: Deadline, bound: Deadline, priority: Priority
    ) -> None:
        """As `acquire`, for units that were granted and cannot be used yet. Others do not overtake the request.

        `bound` ends the wait beyond the share.
        """
        granted = asyncio.Event()
        request = CapacityRequest(tenant, amount, granted.set, priority)
        self.pool.requeue(request)
        self._probe_units, self._probe_s = amount, min(_PROBE_MAX_S, 2 * self._probe_s)
        self._fits = False
        if self._probe is None:
            self._probe = asyncio.get_running_loop().call_later(self._probe_s, self._raise_limit)
        await self._wait(granted, request, deadline, bound)

    def probe(self) -> None:
        """Lets a request find out now whether it can use its units, if some cannot be used."""
        if self._probe is not None:
            self._probe.cancel()
            self._raise_limit()

    def _raise_limit(self) -> None:
        """Lets more requests find out whether they can use their units. Twice as many each time that all can.

        The pause grows while none can.
        """
        self._probe = None
        if self._fits:
            self._probe_s = _PROBE_S
        if self.pool.raise_limit(self._probe_units):
            self._probe_units, self._fits = 2 * self._probe_units, True
            self._probe = asyncio.get_running_loop().call_later(self._probe_s, self._raise_limit)

    async def _wait(
        self,
        granted: asyncio.Event,
        request: CapacityRequest,
        deadline: Deadline,
        bound: Deadline,
    ) -> None:
        """Raises as `acquire` does, without the units."""
        try:
            in_time = await self._wait_granted(granted, request, deadline, bound)
        except asyncio.CancelledError:
            if not self.pool.cancel(request):
                self.pool.release(request.tenant, request.amount, request.priority)
            raise
        if not in_time and self.pool.cancel(request):
            raise self._timeout_error(request, deadline)

    async def _wait_granted(
        self,
        granted: asyncio.Event,
        request: CapacityRequest,
        deadline: Deadline,
        bound: Deadline,
    ) -> bool:
        """False when the wait has ended first. A request that is within the share by then waits on."""
        while not granted.is_set():
            within = self.pool.within_share(request)
            left_s = min(deadline.remaining_s(), math.inf if within else bound.remaining_s())
            if left_s <= 0:
                return False
            await wait_briefly(granted.wait(), left_s)
        return True

    def release(self, tenant: str, amount: int, priority: Priority, held_s: float) -> None:
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
        return ahead and self._mean_hold_s * ahead / max(1, self.pool.usable)

    def wait_of_holder_s(self, tenant: str, priority: Priority = Priority.NORMAL) -> float:
        """How long a tenant may wait for the use of a unit that was granted to it."""
        share = self.pool.share(tenant, priority)
        within = self.pool.used_by(tenant, priority) <= max(1.0, share)
        return math.inf if within else self._wait_s

    def _timeout_error(self, request: CapacityRequest, deadline: Deadline) -> HeadraceError:
        if not deadline.expired:
            return self._full_error(request.tenant, request.amount, request.priority)
        return DeadlineExceeded.waiting_for(f"room for {request.amount} {self._unit}")

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


class Held:
    """Units of a resource that a tenant holds since it got them."""

    __slots__ = ("_acquired_s", "_amount", "_bound", "_priority", "_resource", "_tenant")

    def __init__(
        self, resource: BoundedResource, tenant: str, amount: int, priority: Priority
    ) -> None:
        self._resource, self._tenant, self._priority = resource, tenant, priority
        self._amount = amount
        self._acquired_s = time.monotonic()
        self._bound: Deadline | None = None
        """Of all waits for their use."""

    @property
    def wait_s(self) -> float:
        """How long the tenant may wait for their use."""
        return self._resource.wait_of_holder_s(self._tenant, self._priority)

    async def wait_again(self, deadline: Deadline) -> None:
        """Gives them back, since they cannot be used yet, and gets them again. Raises as `acquire` does."""
        amount, self._amount = self._amount, 0
        self._bound = bound = self._bound or self._resource.wait_bound()
        await self._resource.wait_again(self._tenant, amount, deadline, bound, self._priority)
        self._amount, self._acquired_s = amount, time.monotonic()

    def close(self) -> None:
        """Gives them back. Repeats are ignored."""
        if self._amount:
            amount, self._amount = self._amount, 0
            held_s = time.monotonic() - self._acquired_s
            self._resource.release(self._tenant, amount, self._priority, held_s)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`max_queued_tokens` bounds the prompt tokens of requests before their first token, and `image_bytes` the images
    of all requests. `wait_s` bounds how long a request beyond its tenant's share waits. A request within the share
    waits until its deadline.
    """

    max_num_seqs: int
    max_queued_tokens: int
    wait_s: float
    image_bytes: int = IMAGES_MIB * 1024**2


class AdmissionPermit:
    """One admitted request, which holds a place among all requests."""

    def __init__(
        self,
        tenant: str,
        priority: Priority,
        deadline: Deadline,
        place: Held,
        shared: Admission,
    ) -> None:
        self.tenant, self.priority, self._deadline = tenant, priority, deadline
        self._shared = shared
        self._held = [place]
        """Until the end."""
        self._tokens: Held | None = None
        self._slot: Held | None = None
        self._prompt_of = ""

    async def acquire_tokens(self, count: int) -> None:
        """Admits the prompt to the queue of prompts that wait for their prefill.

        Raises QueueFull, DeadlineExceeded, or InvalidRequest for a prompt beyond the bound.
        """
        tokens = self._shared.tokens
        if count > tokens.pool.capacity:
            raise InvalidRequest(
                {
                    "prompt": f"has {count} tokens, and all that wait may have "
                    f"{tokens.pool.capacity}; shorten it"
                }
            )
        self._tokens = await tokens.acquire(self.tenant, count, self._deadline, self.priority)

    async def acquire_images(self, size: int) -> None:
        """Admits the bytes of a request's images, until it ends. Raises QueueFull or DeadlineExceeded."""
        images = self._shared.images
        # Images beyond the bound by themselves are admitted alone.
        size = min(size, images.pool.capacity)
        if size:
            held = await images.acquire(self.tenant, size, self._deadline, self.priority)
            self._held.append(held)

    async def acquire_slot(self, model: str) -> None:
        """Waits for a slot of the model's decode workers. Raises QueueFull or DeadlineExceeded.

        Does nothing while no worker of the model has been seen.
        """
        slots = self._shared.slots_of(model)
        if slots is not None:
            self._slot = await slots.acquire(self.tenant, 1, self._deadline, self.priority)
            self._held.append(self._slot)
        self._prompt_of = model
        self._shared.count_prompt(model, 1)

    def expected_slot_wait_s(self, model: str) -> float:
        """How long `acquire_slot` is likely to take. 0 when nothing is known."""
        slots = self._shared.slots_of(model)
        return slots.expected_wait_s(self.tenant, self.priority) if slots is not None else 0.0

    @property
    def slot_wait_s(self) -> float:
        """How long the request may wait for a worker on which its slot is still taken."""
        return self._slot.wait_s if self._slot is not None else 0.0

    async def wait_for_room(self) -> None:
        """Waits for a slot again, since no worker had blocks for the request. Raises as `acquire_slot` does."""
        if self._slot is None:
            await asyncio.sleep(_PROBE_S)
        else:
            await self._slot.wait_again(self._deadline)

    def release_tokens(self) -> None:
        """The prompt no longer waits. Repeats are ignored."""
        tokens, self._tokens = self._tokens, None
        if tokens is not None:
            tokens.close()
        if self._prompt_of:
            self._shared.count_prompt(self._prompt_of, -1)
            self._prompt_of = ""

    def close(self) -> None:
        """The request has ended. Repeats are ignored."""
        self.release_tokens()
        for held in reversed(self._held):
            held.close()


class Admission:
    """Admits requests. One event loop owns it."""

    def __init__(
        self,
        limits: AdmissionLimits,
        weights: Callable[[], Mapping[str, float]],
        watched: Callable[[str, FairPool], FairPool] = lambda name, pool: pool,
    ) -> None:
        """`watched` may replace a new pool by one that does the same."""

        def bounded(name: str, unit: str, capacity: int) -> BoundedResource:
            pool = watched(name, FairPool(capacity, weights))
            return BoundedResource(name, unit, pool, limits.wait_s)

        self.requests = bounded("requests", "requests", limits.max_num_seqs)
        """Places of admitted requests."""
        self.tokens = bounded("tokens", "queued tokens", limits.max_queued_tokens)
        """Prompt tokens of requests before their first token."""
        self.images = bounded("images", "bytes of images", limits.image_bytes)
        """Of admitted requests."""
        self.prompts: Counter[str] = Counter()
        """Requests of each model that have a slot and no token yet."""
        self._slots: dict[str, BoundedResource] = {}
        self.slots_of: Callable[[str], BoundedResource | None] = self._slots.get
        """The slots of a model's decode workers. None while no worker of it has been seen."""
        self._limits = limits
        self._weights, self._watched = weights, watched

    @property
    def waiting(self) -> int:
        """The number of requests that wait for admission."""
        all_resources = (self.requests, self.tokens, self.images, *self._slots.values())
        return sum(one.pool.waiting for one in all_resources)

    @property
    def slots(self) -> int:
        """The slots of decode workers that this process may use, of all models."""
        return sum(one.pool.capacity for one in self._slots.values())

    @property
    def used_slots(self) -> int:
        """The slots that admitted requests occupy."""
        return sum(one.pool.used for one in self._slots.values())

    def resize_slots(self, model: str, slots: int) -> None:
        """Sets how many slots of the model's decode workers this process may use.

        0 means that no worker is reachable. The number stays then: workers that are lost for a moment return to as many
        requests as before.
        """
        if not slots:
            return
        capacity = min(slots, self._limits.max_num_seqs)
        if model in self._slots:
            self._slots[model].pool.resize(capacity)
            return
        pool = FairPool(capacity, self._weights, queue_above_share=True)
        pool = self._watched(f"slots of {model}", pool)
        self._slots[model] = BoundedResource("slots", "decode slots", pool, self._limits.wait_s)

    def count_prompt(self, model: str, count: int) -> None:
        """So many more requests of the model have a slot and no token yet, or fewer."""
        self.prompts[model] += count

    def waiting_for_slot(self, model: str) -> int:
        """The number of requests that wait for a slot of the model's decode workers."""
        slots = self._slots.get(model)
        return slots.pool.waiting if slots is not None else 0

    async def admit(
        self, tenant: str, deadline: Deadline, priority: Priority = Priority.NORMAL
    ) -> AdmissionPermit:
        """Admits a request, at once or after a bounded wait. The permit must be closed.

        Raises QueueFull with a retry delay, or DeadlineExceeded.
        """
        self.tokens.reject_if_full(tenant, priority)
        place = await self.requests.acquire(tenant, 1, deadline, priority)
        return AdmissionPermit(tenant, priority, deadline, place, self)
