"""Fair shares of tenants and classes: the bound holds, weights decide once capacity is short, none starves."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import closing
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_frontend.admission.admission import Admission, AdmissionLimits
from headrace_frontend.admission.fair_share import CapacityRequest, Claimant, FairPool, Grant
from tests.waiting import until

_LATER = Deadline.after(24 * 3600)


class Clients:
    """Makes requests for tenants, and records which are granted."""

    def __init__(
        self,
        capacity: int,
        weights: dict[str, float] | None = None,
        queue_above_share: bool = False,
    ) -> None:
        self.weights = weights or {}
        self.pool = FairPool(capacity, lambda: self.weights, queue_above_share=queue_above_share)
        self.queue_above_share = queue_above_share
        self.held: list[CapacityRequest] = []
        self.waiting: list[CapacityRequest] = []

    def request(self, tenant: str, amount: int = 1, priority: Priority = Priority.NORMAL) -> Grant:
        request = CapacityRequest(tenant, amount, lambda: self._granted(request), priority)
        grant = self.pool.acquire(request)
        if grant is not Grant.REJECTED:
            (self.held if grant is Grant.GRANTED else self.waiting).append(request)
        return grant

    def _granted(self, request: CapacityRequest) -> None:
        self.waiting.remove(request)
        self.held.append(request)
        assert self.pool.used <= self.pool.capacity
        if self.queue_above_share and not self._within_share(request.tenant):
            below = {waiting.tenant for waiting in self.waiting if self._could_use(waiting)}
            assert not below, "a tenant below its share was passed over"

    def _within_share(self, tenant: str) -> bool:
        used = self.pool.used_by(tenant)
        return used <= 1 or used <= self.pool.share(tenant) + 1e-6

    def _could_use(self, waiting: CapacityRequest) -> bool:
        used = self.pool.used_by(waiting.tenant)
        return not used or used + waiting.amount <= self.pool.share(waiting.tenant) - 1e-6

    def release(self, index: int) -> None:
        request = self.held.pop(index)
        self.pool.release(request.tenant, request.amount, request.priority)

    def cancel(self, index: int) -> None:
        assert self.pool.cancel(self.waiting.pop(index))

    def check(self) -> None:
        pool = self.pool
        used = Counter[str]()
        for request in self.held:
            used[request.tenant] += request.amount
        assert pool.used == used.total() <= pool.capacity
        assert pool.waiting == len(self.waiting)
        assert all(pool.used_by(tenant) == amount for tenant, amount in used.items())


@pytest.mark.parametrize("weight,share", [(1.0, 2), (3.0, 3), (0.001, 1)])
def test_a_tenant_below_its_share_waits_and_one_above_is_rejected(
    weight: float, share: int
) -> None:
    clients = Clients(4)
    for _ in range(4):
        clients.request("greedy")
    # A change of weights takes effect at once.
    clients.weights = {"late": weight}
    grants = [clients.request("late") for _ in range(share + 1)]
    assert grants == [Grant.WAITING] * share + [Grant.REJECTED]
    assert clients.request("greedy") is Grant.REJECTED
    for _ in range(share):
        clients.release(0)
    assert Counter(request.tenant for request in clients.held) == {
        "greedy": 4 - share,
        "late": share,
    }
    clients.check()


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("request"), st.sampled_from("abcd"), st.integers(1, 4)),
        st.tuples(st.just("release"), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 50), st.just(0)),
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(
    capacity=st.integers(1, 12),
    weights=st.dictionaries(st.sampled_from("abc"), st.floats(0.01, 100.0)),
    steps=_STEPS,
)
def test_the_bound_holds_and_the_counts_agree_after_every_step(
    capacity: int, weights: dict[str, float], steps: list[tuple[str, object, int]]
) -> None:
    clients = Clients(capacity, weights)
    for kind, what, amount in steps:
        if kind == "request":
            used = clients.pool.used
            grant = clients.request(str(what), amount)
            if used + amount <= capacity and not clients.waiting:
                assert grant is Grant.GRANTED
        elif kind == "release" and clients.held:
            clients.release(int(str(what)) % len(clients.held))
        elif kind == "cancel" and clients.waiting:
            clients.cancel(int(str(what)) % len(clients.waiting))
        clients.check()
        if clients.waiting:
            # A request waits only while the first that is due does not fit.
            assert clients.pool.used + max(request.amount for request in clients.waiting) > capacity
    while clients.held or clients.waiting:
        # Every waiting request is granted, at the latest when all others have ended.
        assert clients.held
        clients.release(0)
    assert clients.pool.used == clients.pool.waiting == 0


_REQUEST = st.tuples(st.just("request"), st.sampled_from("aaabbcd"))
_SLOT_STEPS = st.lists(
    # More requests than releases, so that most steps find waiting requests.
    st.one_of(
        *(_REQUEST, _REQUEST, _REQUEST),
        st.tuples(st.just("release"), st.integers(0, 50)),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
        st.tuples(st.just("resize"), st.integers(1, 6)),
        st.tuples(st.just("weigh"), st.floats(0.1, 10.0)),
    ),
    min_size=20,
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(capacity=st.integers(1, 6), steps=_SLOT_STEPS)
def test_slots_are_never_exceeded_never_idle_and_go_to_tenants_below_their_share_first(
    capacity: int, steps: list[tuple[str, object]]
) -> None:
    clients = Clients(capacity, queue_above_share=True)
    for kind, what in steps:
        used = clients.pool.used
        if kind == "request":
            free = used < clients.pool.capacity
            assert clients.request(str(what)) is (Grant.GRANTED if free else Grant.WAITING)
        elif kind == "release" and clients.held:
            clients.release(int(str(what)) % len(clients.held))
        elif kind == "cancel" and clients.waiting:
            clients.cancel(int(str(what)) % len(clients.waiting))
        elif kind == "resize":
            clients.pool.resize(int(str(what)))
        elif kind == "weigh":
            clients.weights = {"a": float(str(what))}
        # A smaller capacity takes no unit away, and grants none until enough are released.
        assert clients.pool.used <= max(used, clients.pool.capacity)
        assert clients.pool.waiting == len(clients.waiting)
        assert not clients.waiting or clients.pool.used >= clients.pool.capacity
    while clients.held or clients.waiting:
        assert clients.held
        clients.release(0)
    assert clients.pool.used == clients.pool.waiting == 0


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.sampled_from((0.5, 1.0, 2.0, 3.0, 5.0)), min_size=2, max_size=4),
    capacity=st.integers(40, 120),
    seed=st.integers(0, 1_000),
)
def test_shares_converge_to_the_weights(weights: list[float], capacity: int, seed: int) -> None:
    random = Random(seed)
    names = [f"t{index}" for index in range(len(weights))]
    clients = Clients(capacity, dict(zip(names, weights, strict=True)))
    while clients.request(names[0]) is Grant.GRANTED:
        pass
    for _ in range(8 * capacity):
        clients.release(random.randrange(len(clients.held)))
        # Every tenant always wants more than it has.
        for name in random.sample(names, len(names)):
            while clients.request(name) is not Grant.REJECTED:
                pass
    for name in names:
        assert clients.pool.used_by(name) == pytest.approx(
            clients.pool.share(name), abs=len(names) + 1
        )


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 10.0), min_size=2, max_size=5),
    capacity=st.integers(1, 20),
    seed=st.integers(0, 1_000),
)
def test_a_tenant_without_units_is_granted_before_others_get_more(
    weights: list[float], capacity: int, seed: int
) -> None:
    random = Random(seed)
    names = [f"t{index}" for index in range(len(weights))]
    clients = Clients(capacity, dict(zip(names, weights, strict=True)))
    for _ in range(3 * capacity):
        for name in random.sample(names, len(names)):
            clients.request(name)
        clients.release(random.randrange(len(clients.held)))
    clients.request("new")
    for _ in range(len(names) + 1):
        if clients.pool.used_by("new"):
            break
        clients.release(0)
        for name in names:
            clients.request(name)
    assert clients.pool.used_by("new") == 1


class Classes(Clients):
    """Tenants with requests in several classes."""

    def _granted(self, request: CapacityRequest) -> None:
        """No unit goes to a claimant while another one that waits holds less for its weight."""
        used = Counter(one.claimant for one in self.held)
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


_CLAIMANTS = st.tuples(st.sampled_from("ab"), st.sampled_from(list(Priority)))


@settings(max_examples=200, deadline=None)
@given(
    capacity=st.integers(1, 8),
    steps=st.lists(st.one_of(_CLAIMANTS, _CLAIMANTS, st.integers(0, 50)), max_size=80),
)
def test_no_class_of_a_tenant_starves(capacity: int, steps: list[Claimant | int]) -> None:
    clients = Classes(capacity, queue_above_share=True)
    for step in steps:
        if not isinstance(step, int):
            clients.request(step[0], priority=step[1])
        elif clients.held:
            clients.release(step % len(clients.held))
        assert clients.pool.used == len(clients.held) <= capacity
    while clients.waiting:
        clients.release(0)
    assert not clients.pool.waiting


def test_the_expected_wait_counts_the_shares_of_the_others() -> None:
    clients = Classes(4, queue_above_share=True)
    pool = clients.pool
    assert pool.units_ahead("a", Priority.HIGH) == 0
    for _ in range(44):
        clients.request("a", priority=Priority.LOW)
    assert pool.units_ahead("a", Priority.LOW) == 41
    assert pool.units_ahead("a", Priority.NORMAL) == pytest.approx(1.25)
    assert pool.units_ahead("b", Priority.HIGH) == pytest.approx(1 + 1 / 16)


async def test_the_slot_that_becomes_free_goes_to_the_class_with_the_least_for_its_weight() -> None:
    admission = Admission(AdmissionLimits(64, 1_000, wait_s=30.0), dict)
    admission.resize_slots("m", 1)
    started: list[str] = []

    async def run(priority: Priority, end: asyncio.Event) -> None:
        permit = await admission.admit("a", _LATER, priority)
        with closing(permit):
            await permit.acquire_slot("m")
            started.append(permit.priority.label)
            await end.wait()

    ends = [asyncio.Event() for _ in range(4)]
    order = (Priority.LOW, Priority.LOW, Priority.NORMAL, Priority.HIGH)
    tasks = []
    for priority, end in zip(order, ends, strict=True):
        tasks.append(asyncio.create_task(run(priority, end)))
        await until(lambda: admission.requests.pool.used == len(tasks))
    await until(lambda: admission.waiting_for_slot("m") == 3)
    for end in (ends[0], ends[3], ends[2], ends[1]):
        end.set()
    await asyncio.gather(*tasks)
    assert started == ["low", "high", "normal", "low"]
