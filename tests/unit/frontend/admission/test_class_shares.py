"""Classes of requests share a pool by their weights, and no class of a tenant starves."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_frontend.admission.admission import Admission, AdmissionLimits
from headrace_frontend.admission.fair_share import CapacityRequest, Claimant, FairPool, Grant
from tests.waiting import until

_LATER = Deadline.after(24 * 3600)
_CLAIMANTS = st.tuples(st.sampled_from("ab"), st.sampled_from(list(Priority)))


class Clients:
    """Makes requests for tenants in classes."""

    def __init__(self, capacity: int) -> None:
        self.pool = FairPool(capacity, dict, queue_above_share=True)
        self.held: list[CapacityRequest] = []
        self.waiting: list[CapacityRequest] = []

    def request(self, claimant: Claimant) -> None:
        tenant, priority = claimant
        request = CapacityRequest(tenant, 1, lambda: self._granted(request), priority)
        if self.pool.acquire(request) is Grant.GRANTED:
            self.held.append(request)
        else:
            self.waiting.append(request)

    def used(self) -> Counter[Claimant]:
        return Counter(request.claimant for request in self.held)

    def _granted(self, request: CapacityRequest) -> None:
        """No unit goes to a claimant while another one that waits holds less for its weight."""
        used = self.used()
        tenant, priority = request.claimant
        self.waiting.remove(request)
        self.held.append(request)
        for other in {one.claimant for one in self.waiting} - {request.claimant}:
            if not used[request.claimant]:
                break
            assert used[other], "a claimant without a unit was passed over"
            own = (used[request.claimant] + 1) / priority.weight
            assert own <= (used[other] + 1) / other[1].weight + 1e-9
        assert self.pool.used_by(tenant, priority) == used[request.claimant] + 1

    def release(self, index: int) -> None:
        request = self.held.pop(index % len(self.held))
        self.pool.release(request.tenant, request.amount, request.priority)


@settings(max_examples=200, deadline=None)
@given(
    capacity=st.integers(1, 8),
    steps=st.lists(st.one_of(_CLAIMANTS, _CLAIMANTS, st.integers(0, 50)), max_size=80),
)
def test_no_class_of_a_tenant_starves(capacity: int, steps: list[Claimant | int]) -> None:
    clients = Clients(capacity)
    for step in steps:
        if not isinstance(step, int):
            clients.request(step)
        elif clients.held:
            clients.release(step)
        assert clients.pool.used == len(clients.held) <= capacity
    while clients.waiting:
        clients.release(0)
    assert not clients.pool.waiting


def test_the_expected_wait_counts_the_shares_of_the_others() -> None:
    clients = Clients(4)
    pool = clients.pool
    assert pool.units_ahead("a", Priority.HIGH) == 0
    for _ in range(44):
        clients.request(("a", Priority.LOW))
    assert pool.units_ahead("a", Priority.LOW) == 41
    assert pool.units_ahead("a", Priority.NORMAL) == pytest.approx(1.25)
    assert pool.units_ahead("b", Priority.HIGH) == pytest.approx(1 + 1 / 16)


async def test_the_slot_that_becomes_free_goes_to_the_class_with_the_least_for_its_weight() -> None:
    admission = Admission(AdmissionLimits(64, 1_000, wait_s=30.0), dict)
    admission.resize_slots("m", 1)
    started: list[str] = []

    async def run(priority: Priority, end: asyncio.Event) -> None:
        permit = await admission.admit("a", _LATER, priority)
        with admission.holding(permit):
            await permit.acquire_slot("m")
            started.append(permit.priority.label)
            await end.wait()

    ends = [asyncio.Event() for _ in range(4)]
    order = (Priority.LOW, Priority.LOW, Priority.NORMAL, Priority.HIGH)
    tasks = []
    for priority, end in zip(order, ends, strict=True):
        tasks.append(asyncio.create_task(run(priority, end)))
        await until(lambda: admission.requests == len(tasks))
    await until(lambda: admission.waiting_for_slot("m") == 3)
    for end in (ends[0], ends[3], ends[2], ends[1]):
        end.set()
    await asyncio.gather(*tasks)
    assert started == ["low", "high", "normal", "low"]
