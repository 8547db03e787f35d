"""Admits requests of this worker's own clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager

from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_decode.admission.admission import Capacity
from headrace_frontend.admission.admission import Admission, AdmissionLimits, AdmissionPermit
from headrace_frontend.admission.bounded_resource import BoundedResource
from headrace_frontend.admission.fair_share import FairPool


class OwnAdmission:
    """Shares places, slots and KV blocks among tenants, as a router shares its own."""

    def __init__(
        self,
        limits: AdmissionLimits,
        capacity: Capacity,
        model: str,
        weights: Callable[[], Mapping[str, float]],
    ) -> None:
        """`weights`: the current weights of tenants."""
        self._capacity = capacity
        self._model = model
        self._admission = Admission(limits, weights)
        self._admission.resize_slots(model, capacity.max_num_seqs)
        pool = FairPool(capacity.usable_blocks, weights, queue_above_share=True)
        self._blocks = BoundedResource("blocks", "KV blocks", pool, limits.wait_s)

    @property
    def requests(self) -> int:
        """The number of admitted requests."""
        return self._admission.requests

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a place, a slot or blocks."""
        return self._admission.waiting + self._blocks.pool.waiting

    async def admit(
        self, tenant: str, deadline: Deadline, priority: Priority = Priority.NORMAL
    ) -> AdmissionPermit:
        """See Admission."""
        return await self._admission.admit(tenant, deadline, priority)

    def holding(self, permit: AdmissionPermit) -> AbstractContextManager[AdmissionPermit]:
        """See Admission."""
        return self._admission.holding(permit)

    @asynccontextmanager
    async def room(
        self, permit: AdmissionPermit, prompt_tokens: int, max_tokens: int, deadline: Deadline
    ) -> AsyncIterator[None]:
        """A slot and blocks over the block. The prompt counts as queued until `permit.release_tokens`.

        Raises InvalidRequest, QueueFull or DeadlineExceeded.
        """
        await permit.acquire_tokens(prompt_tokens)
        await permit.acquire_slot(self._model)
        needed = self._capacity.blocks_for(prompt_tokens, max_tokens)
        # The engine rejects a request for more blocks than there are.
        blocks = min(needed, self._capacity.usable_blocks)
        async with self._blocks.holding(permit.tenant, blocks, deadline, permit.priority):
            yield
