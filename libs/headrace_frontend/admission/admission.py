"""Admission control: bounds on requests, on queued prompt tokens and on slots of decode workers, fair among tenants.

A request occupies a place of the process first. Beyond a tenant's share of the places it is rejected before any work is
done for it. Then its prompt counts as queued, and at last it gets a slot of its model's decode workers. For a slot,
requests wait here and not at the engines, because these serve in the order of arrival. The error of a rejection
contains a retry delay, estimated from how fast requests end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_common.errors import InvalidRequest
from headrace_frontend.admission.bounded_resource import BoundedResource
from headrace_frontend.admission.fair_share import FairPool


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`max_queued_tokens` bounds the prompt tokens of requests before their first token, and `image_bytes` the images
    of all requests. `wait_s` bounds how long a request beyond its tenant's share waits. A request within the share
    waits until its deadline.
    """

    max_num_seqs: int
    max_queued_tokens: int
    wait_s: float
    image_bytes: int = 1024 * 1024 * 1024


class AdmissionPermit:
    """One admitted request."""

    def __init__(
        self,
        tenant: str,
        tokens: BoundedResource,
        images: BoundedResource,
        slots: Mapping[str, BoundedResource],
        deadline: Deadline,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        """`slots`: by model."""
        self.tenant = tenant
        self.priority = priority
        self._resource = tokens
        self._images = images
        self._slots = slots
        self._deadline = deadline
        self._tokens = 0
        self._image_bytes = 0
        self._acquired_s = 0.0
        self._slot: BoundedResource | None = None
        self._slot_acquired_s = 0.0

    async def acquire_tokens(self, count: int) -> None:
        """Admits the prompt to the queue of prompts that wait for their prefill.

        Raises QueueFull, DeadlineExceeded, or InvalidRequest for a prompt beyond the bound.
        """
        if count > self._resource.pool.capacity:
            raise InvalidRequest(
                {
                    "prompt": f"has {count} tokens, and max_queued_tokens is "
                    f"{self._resource.pool.capacity}; shorten it"
                }
            )
        await self._resource.acquire(self.tenant, count, self._deadline, self.priority)
        self._tokens, self._acquired_s = count, time.monotonic()

    async def acquire_images(self, size: int) -> None:
        """Admits the bytes of a request's images, until it ends. Raises QueueFull or DeadlineExceeded."""
        # Images beyond the bound by themselves are admitted alone.
        size = min(size, self._images.pool.capacity)
        if size:
            await self._images.acquire(self.tenant, size, self._deadline, self.priority)
            self._image_bytes = size

    async def acquire_slot(self, model: str) -> None:
        """Waits for a slot of the model's decode workers. Raises QueueFull or DeadlineExceeded.

        Does nothing while no worker of the model has been seen.
        """
        slots = self._slots.get(model)
        if slots is not None:
            await slots.acquire(self.tenant, 1, self._deadline, self.priority)
            self._slot, self._slot_acquired_s = slots, time.monotonic()

    def expected_slot_wait_s(self, model: str) -> float:
        """How long `acquire_slot` is likely to take. 0 when nothing is known."""
        slots = self._slots.get(model)
        return slots.expected_wait_s(self.tenant, self.priority) if slots is not None else 0.0

    @property
    def slot_wait_s(self) -> float:
        """How long the request may wait for a worker on which its slot is still taken."""
        slot = self._slot
        return slot.wait_of_holder_s(self.tenant, self.priority) if slot is not None else 0.0

    def release_slot(self) -> None:
        """The request has ended on its decode worker. Repeats are ignored."""
        if self._slot is not None:
            slot, self._slot = self._slot, None
            held_s = time.monotonic() - self._slot_acquired_s
            slot.release(self.tenant, 1, held_s, self.priority)

    def release_images(self, held_s: float) -> None:
        """The request has ended after `held_s`. Repeats are ignored."""
        if self._image_bytes:
            size, self._image_bytes = self._image_bytes, 0
            self._images.release(self.tenant, size, held_s, self.priority)

    def release_tokens(self) -> None:
        """The prompt no longer waits. Repeats are ignored."""
        if self._tokens:
            tokens, self._tokens = self._tokens, 0
            held_s = time.monotonic() - self._acquired_s
            self._resource.release(self.tenant, tokens, held_s, self.priority)


class Admission:
    """Admits requests. One event loop owns it."""

    def __init__(self, limits: AdmissionLimits, weights: Callable[[], Mapping[str, float]]) -> None:
        self._requests = BoundedResource(
            "requests", "requests", FairPool(limits.max_num_seqs, weights), limits.wait_s
        )
        self._tokens = BoundedResource(
            "tokens", "queued tokens", FairPool(limits.max_queued_tokens, weights), limits.wait_s
        )
        self._images = BoundedResource(
            "images", "bytes of images", FairPool(limits.image_bytes, weights), limits.wait_s
        )
        self._limits = limits
        self._weights = weights
        self._slots: dict[str, BoundedResource] = {}
        """By model."""

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
        pools = (
            self._requests.pool,
            self._tokens.pool,
            self._images.pool,
            *(one.pool for one in self._slots.values()),
        )
        return sum(pool.waiting for pool in pools)

    @property
    def slots(self) -> int:
        """The slots of decode workers that this process may use, of all models."""
        return sum(one.pool.capacity for one in self._slots.values())

    @property
    def used_slots(self) -> int:
        """The slots that admitted requests occupy."""
        return sum(one.pool.used for one in self._slots.values())

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of requests before their first token."""
        return self._tokens.pool.used

    @property
    def image_bytes(self) -> int:
        """Bytes of the images of admitted requests."""
        return self._images.pool.used

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
        self._slots[model] = BoundedResource("slots", "decode slots", pool, self._limits.wait_s)

    def waiting_for_slot(self, model: str) -> int:
        """The number of requests that wait for a slot of the model's decode workers."""
        slots = self._slots.get(model)
        return slots.pool.waiting if slots is not None else 0

    async def admit(
        self, tenant: str, deadline: Deadline, priority: Priority = Priority.NORMAL
    ) -> AdmissionPermit:
        """Admits a request, at once or after a bounded wait. The permit must be released.

        Raises QueueFull with a retry delay, or DeadlineExceeded.
        """
        self._tokens.reject_if_full(tenant, priority)
        await self._requests.acquire(tenant, 1, deadline, priority)
        return AdmissionPermit(tenant, self._tokens, self._images, self._slots, deadline, priority)

    def release(self, permit: AdmissionPermit, held_s: float) -> None:
        """The request has ended after `held_s`."""
        permit.release_tokens()
        permit.release_slot()
        permit.release_images(held_s)
        self._requests.release(permit.tenant, 1, held_s, permit.priority)

    @contextmanager
    def holding(self, permit: AdmissionPermit) -> Iterator[AdmissionPermit]:
        """Releases the permit at the end of the block."""
        entered_s = time.monotonic()
        try:
            yield permit
        finally:
            self.release(permit, time.monotonic() - entered_s)
