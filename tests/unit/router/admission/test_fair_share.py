"""Fair shares: the bound holds, weights decide once there is not enough, nobody starves, nothing idles."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_router.admission.fair_share import CapacityRequest, FairPool, Grant


class Clients:
    """Asks a pool on behalf of tenants, and remembers what they got."""

    def __init__(self, capacity: int, weights: dict[str, float] | None = None) -> None:
        self.weights = weights or {}
        self.pool = FairPool(capacity, lambda: self.weights)
        self.held: list[CapacityRequest] = []
        self.waiting: list[CapacityRequest] = []

    def ask(self, tenant: str, amount: int = 1) -> Grant:
        claim = CapacityRequest(tenant, amount, lambda: self._granted(claim))
        answer = self.pool.ask(claim)
        if answer is not Grant.REFUSED:
            (self.held if answer is Grant.TAKEN else self.waiting).append(claim)
        return answer

    def _granted(self, claim: CapacityRequest) -> None:
        self.waiting.remove(claim)
        self.held.append(claim)

    def release(self, index: int) -> None:
        claim = self.held.pop(index)
        self.pool.give_back(claim.tenant, claim.amount)

    def withdraw(self, index: int) -> None:
        assert self.pool.withdraw(self.waiting.pop(index))

    def check(self) -> None:
        pool = self.pool
        used = Counter[str]()
        for claim in self.held:
            used[claim.tenant] += claim.amount
        assert pool.used == used.total() <= pool.capacity
        assert pool.waiting == len(self.waiting)
        assert all(pool.used_by(tenant) == amount for tenant, amount in used.items())


def test_one_tenant_alone_uses_all_and_is_refused_beyond() -> None:
    clients = Clients(3)
    assert [clients.ask("a") for _ in range(4)] == [Grant.TAKEN] * 3 + [Grant.REFUSED]
    clients.release(0)
    assert clients.ask("a") is Grant.TAKEN


def test_a_tenant_below_its_share_waits_and_one_above_is_refused() -> None:
    clients = Clients(4)
    for _ in range(4):
        clients.ask("greedy")
    assert [clients.ask("late") for _ in range(3)] == [Grant.WAITING] * 2 + [Grant.REFUSED]
    assert clients.ask("greedy") is Grant.REFUSED
    clients.release(0)
    clients.release(0)
    assert Counter(claim.tenant for claim in clients.held) == {"greedy": 2, "late": 2}
    clients.check()


def test_weights_count_from_the_moment_that_they_change() -> None:
    clients = Clients(4, {"late": 1.0})
    for _ in range(4):
        clients.ask("greedy")
    clients.weights = {"late": 3.0}
    answers = [clients.ask("late") for _ in range(4)]
    assert answers == [Grant.WAITING] * 3 + [Grant.REFUSED]


def test_a_tenant_with_a_tiny_weight_still_gets_something() -> None:
    clients = Clients(4, {"tiny": 0.001})
    for _ in range(4):
        clients.ask("big")
    assert clients.ask("tiny") is Grant.WAITING
    clients.release(0)
    assert clients.pool.used_by("tiny") == 1


def test_a_large_claim_is_not_overtaken_and_an_impossible_one_is_refused() -> None:
    clients = Clients(10)
    clients.ask("a", 9)
    assert clients.ask("b", 11) is Grant.REFUSED
    assert clients.ask("b", 5) is Grant.WAITING
    assert clients.ask("a", 1) is Grant.REFUSED
    assert clients.ask("c", 1) is Grant.WAITING
    clients.release(0)
    assert sorted(claim.tenant for claim in clients.held) == ["b", "c"]
    clients.ask("a", 4)
    assert clients.ask("d", 9) is Grant.WAITING
    assert clients.ask("e", 1) is Grant.WAITING
    # What stood in the way of others has been given up.
    clients.withdraw(0)
    clients.release(0)
    assert clients.pool.used_by("e") == 1
    clients.check()


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("abcd"), st.integers(1, 4)),
        st.tuples(st.just("release"), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("withdraw"), st.integers(0, 50), st.just(0)),
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(
    capacity=st.integers(1, 12),
    weights=st.dictionaries(st.sampled_from("abc"), st.floats(0.01, 100.0)),
    steps=_STEPS,
)
def test_the_bound_holds_and_the_books_balance_whatever_happens(
    capacity: int, weights: dict[str, float], steps: list[tuple[str, object, int]]
) -> None:
    clients = Clients(capacity, weights)
    for kind, what, amount in steps:
        if kind == "ask":
            used = clients.pool.used
            answer = clients.ask(str(what), amount)
            if used + amount <= capacity and not clients.waiting:
                assert answer is Grant.TAKEN
        elif kind == "release" and clients.held:
            clients.release(int(str(what)) % len(clients.held))
        elif kind == "withdraw" and clients.waiting:
            clients.withdraw(int(str(what)) % len(clients.waiting))
        clients.check()
        if clients.waiting:
            # Somebody waits only when the first that is due does not fit.
            assert clients.pool.used + max(claim.amount for claim in clients.waiting) > capacity
    while clients.held or clients.waiting:
        # Whoever waits gets in, at the latest when the others have ended.
        assert clients.held
        clients.release(0)
    assert clients.pool.used == clients.pool.waiting == 0


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.sampled_from((0.5, 1.0, 2.0, 3.0, 5.0)), min_size=2, max_size=4),
    capacity=st.integers(40, 120),
    seed=st.integers(0, 1_000),
)
def test_shares_converge_to_the_weights_from_any_beginning(
    weights: list[float], capacity: int, seed: int
) -> None:
    random = Random(seed)
    names = [f"t{index}" for index in range(len(weights))]
    clients = Clients(capacity, dict(zip(names, weights, strict=True)))
    while clients.ask(names[0]) is Grant.TAKEN:
        pass
    for _ in range(8 * capacity):
        clients.release(random.randrange(len(clients.held)))
        # Everybody wants more than there is, all the time.
        for name in random.sample(names, len(names)):
            while clients.ask(name) is not Grant.REFUSED:
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
def test_a_tenant_that_has_nothing_gets_in_before_anybody_gets_more(
    weights: list[float], capacity: int, seed: int
) -> None:
    random = Random(seed)
    names = [f"t{index}" for index in range(len(weights))]
    clients = Clients(capacity, dict(zip(names, weights, strict=True)))
    for _ in range(3 * capacity):
        for name in random.sample(names, len(names)):
            clients.ask(name)
        clients.release(random.randrange(len(clients.held)))
    clients.ask("new")
    for _ in range(len(names) + 1):
        if clients.pool.used_by("new"):
            break
        clients.release(0)
        for name in names:
            clients.ask(name)
    assert clients.pool.used_by("new") == 1
