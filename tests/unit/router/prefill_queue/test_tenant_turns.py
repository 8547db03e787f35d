"""Tenants of a class share the computed tokens by weight, and deadlines order only a tenant's own prompts."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.prefill.v1 import prefill_pb2
from headrace_common.callers.priority import Priority
from headrace_common.errors import Draining
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import QueuedTask
from headrace_simulator.virtual_time import run_virtually
from tests.sim_layout import LAYOUT
from tests.unit.router.prefill_queue.test_queue import add, end, join, sent, unsigned

_WEIGHTS: Mapping[str, float] = {"batch": 0.5, "chat": 3.0}
_TENANTS = ("batch", "chat", "search", "other")
_TOKENS_MAX = 1_000
_NO_DEADLINE_S = 1e9


@dataclass(frozen=True)
class Prompt:
    """What a tenant asks for. `cached_expected` tokens are in the router's index, and `cached_found` on the worker."""

    tenant: str
    tokens: int
    deadline_s: float = _NO_DEADLINE_S
    cached_expected: int = 0
    cached_found: int = 0

    @property
    def computed(self) -> int:
        return max(1, self.tokens - self.cached_found)


_PROMPTS = st.builds(
    Prompt,
    tenant=st.sampled_from(_TENANTS),
    tokens=st.integers(1, _TOKENS_MAX),
    deadline_s=st.floats(1, 1e6),
    cached_expected=st.integers(0, _TOKENS_MAX),
    cached_found=st.integers(0, _TOKENS_MAX),
)


class Served:
    """A queue, and one worker that computes one prompt at a time."""

    def __init__(self) -> None:
        self.queue = PrefillQueue(100_000, sign=unsigned, tenant_weights=lambda: _WEIGHTS)
        self.worker = join(self.queue)
        self.waiting: Counter[str] = Counter()
        self._prompts: dict[str, Prompt] = {}
        self._names = map(str, itertools.count())

    def arrive(self, prompt: Prompt) -> QueuedTask:
        name = next(self._names)
        self._prompts[name] = prompt
        self.waiting[prompt.tenant] += 1
        cached = {self.worker.ref: prompt.cached_expected} if prompt.cached_expected else {}
        terms: dict[str, Any] = {"tokens": prompt.tokens, "tenant": prompt.tenant, "cached": cached}
        return add(self.queue, name, prompt.deadline_s, **terms)

    def compute(self) -> Prompt | None:
        """Computes the next prompt. None when none waits."""
        if not self.queue.depth:
            return None
        self.queue.add_credits(self.worker, 1)
        (name,) = self.worker.tasks
        prompt = self._prompts[name]
        self.waiting[prompt.tenant] -= 1
        done = prefill_pb2.TaskDone(transfer_id=name, cached_tokens=prompt.cached_found)
        self.queue.task_ended(self.worker, done)
        sent(self.worker)
        return prompt


def _weight(tenant: str) -> float:
    return _WEIGHTS.get(tenant, 1.0)


def _computed_in_order(prompts: Sequence[Prompt]) -> list[Prompt]:
    """All of the prompts wait at first."""
    served = Served()
    for prompt in prompts:
        served.arrive(prompt)
    return list(iter(served.compute, None))


class Shares:
    """What each pair of tenants got since both have prompts that wait."""

    def __init__(self) -> None:
        self._got: dict[tuple[str, str], Counter[str]] = {}

    def computed(self, prompt: Prompt, waited: Counter[str]) -> None:
        """`waited` are the prompts that waited when this one was handed out, with this one."""
        for pair in itertools.combinations(_TENANTS, 2):
            if not all(waited[tenant] for tenant in pair):
                self._got.pop(pair, None)
                continue
            got = self._got.setdefault(pair, Counter())
            if prompt.tenant in pair:
                got[prompt.tenant] += prompt.computed
            one, other = pair
            difference = abs(got[one] / _weight(one) - got[other] / _weight(other))
            assert difference <= _TOKENS_MAX / _weight(one) + _TOKENS_MAX / _weight(other) + 1e-6


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.one_of(_PROMPTS, _PROMPTS, st.none()), max_size=120))
def test_tenants_get_their_shares_of_computed_tokens_within_one_prompt(
    steps: list[Prompt | None],
) -> None:
    """Whatever the sizes, the numbers and the deadlines of their prompts, and whatever was believed to be cached."""

    async def drive() -> None:
        served, shares = Served(), Shares()
        arrived = computed = 0
        # The last steps compute until nothing waits.
        for step in itertools.chain(steps, itertools.repeat(None)):
            if step is not None:
                served.arrive(step)
                arrived += 1
                continue
            waited = Counter(served.waiting)
            prompt = served.compute()
            if prompt is not None:
                computed += 1
                shares.computed(prompt, waited)
            elif computed == arrived:
                # None starves.
                break
        assert served.queue.depth == 0

    run_virtually(drive)


@settings(max_examples=100, deadline=None)
@given(
    tenants=st.lists(st.sampled_from(_TENANTS), max_size=60),
    seed=st.integers(0, 1_000),
)
def test_deadlines_change_the_order_of_no_other_tenant(tenants: list[str], seed: int) -> None:
    async def drive() -> None:
        deadlines = random.Random(seed)
        without = [Prompt(tenant, 100) for tenant in tenants]
        with_deadlines = [
            replace(one, deadline_s=deadlines.uniform(1, 100))
            if one.tenant in ("batch", "search")
            else one
            for one in without
        ]
        served = _computed_in_order(with_deadlines)
        assert [one.tenant for one in served] == [one.tenant for one in _computed_in_order(without)]
        for tenant in _TENANTS:
            own = [one.deadline_s for one in served if one.tenant == tenant]
            assert own == sorted(own)

    run_virtually(drive)


async def test_a_prompt_waits_for_one_of_another_tenant_with_many_that_are_due() -> None:
    served = Served()
    for number in range(24):
        served.arrive(Prompt("search", _TOKENS_MAX, deadline_s=30.0 + number))
    assert served.compute() == Prompt("search", _TOKENS_MAX, deadline_s=30.0)
    late = Prompt("other", _TOKENS_MAX)
    assert served.arrive(late).tasks_ahead <= 1
    assert late in (served.compute(), served.compute())


async def test_the_expected_wait_is_that_of_the_tenant() -> None:
    served = Served()
    queue, worker = served.queue, served.worker
    # The worker takes a second for a prompt of 1,000 tokens.
    for _ in range(24):
        served.arrive(Prompt("search", _TOKENS_MAX, deadline_s=30.0))
    queue.add_credits(worker, 1)
    end(queue, worker, "0", token_s=0.001)
    queue.add_credits(worker, 1)
    assert queue.wait_s("sim", Priority.NORMAL, "search") == pytest.approx(23.0)
    assert queue.wait_s("sim", Priority.NORMAL, "other") == pytest.approx(2.0)
    assert queue.wait_s("sim") == pytest.approx(23.0)
    queue.expect_task(LAYOUT, 10 * _TOKENS_MAX, Priority.NORMAL, "search")
    assert queue.wait_s("sim", Priority.NORMAL, "other") == pytest.approx(2.0)
    assert queue.wait_s("sim", Priority.NORMAL, "search") == pytest.approx(33.0)


async def test_a_busy_worker_keeps_its_last_credit_for_other_tenants() -> None:
    served = Served()
    queue, worker = served.queue, served.worker
    for number in range(8):
        add(queue, f"a{number}", tokens=3_000, tenant="search")
    queue.add_credits(worker, 4)
    assert sent(worker) == ["a0", "a1", "a2"]
    # It counts as no room for the tenant that waits.
    assert queue.wait_s("sim", Priority.NORMAL, "search") >= 0.0
    assert add(queue, "b0", tokens=10, tenant="other").worker == worker.ref
    assert add(queue, "b1", tokens=10, tenant="other").worker is None
    end(queue, worker, "a0")
    queue.add_credits(worker, 1)
    assert sent(worker) == ["b0"]
    # The next one is that of the tenant which has no prompt there.
    assert add(queue, "c0", tokens=10, tenant="chat").worker == worker.ref
    end(queue, worker, "a1")
    end(queue, worker, "a2")
    queue.add_credits(worker, 2)
    assert sent(worker) == ["c0", "b1", "a3"]


async def test_short_prompts_of_one_tenant_use_all_credits() -> None:
    served = Served()
    for number in range(8):
        add(served.queue, f"a{number}", tokens=1_000, tenant="search")
    served.queue.add_credits(served.worker, 4)
    assert len(sent(served.worker)) == 4


async def test_a_returned_prompt_costs_its_tenant_nothing() -> None:
    served = Served()
    queue, worker = served.queue, served.worker
    other = join(queue, "p1")
    returned = add(queue, "a", tokens=_TOKENS_MAX, tenant="search", returns_max=1)
    for name, tenant in (("b", "search"), ("c", "other"), ("d", "search"), ("e", "other")):
        add(queue, name, tokens=_TOKENS_MAX, tenant=tenant)
    queue.add_credits(worker, 1)
    assert returned.worker == worker.ref
    end(queue, worker, "a", Draining.reason)
    queue.add_credits(other, 5)
    assert sent(other) == ["a", "c", "b", "e", "d"]
