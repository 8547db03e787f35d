"""KV-aware placement: a table of cases, and a comparison with a plain loop over the workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from headrace.inference.v1 import inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import NoDecodeWorker
from headrace_common.registry.adapters import Adapter
from headrace_kv.compatibility import fingerprint
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_router.costs import MESSAGES_S, Candidates
from headrace_router.placement import Decision, KvAware, PlacementRequest, RoutePolicy
from headrace_router.workers.table import GENERIC_STEPS, Load, LoadTable, Worker
from tests.sim_layout import LAYOUT

_PREFILL = WorkerRef("p0", "a")
_PULLING = {fingerprint(replace(LAYOUT, tensor_parallel_size=2)): frozenset({_PREFILL})}
_REQUEST = PlacementRequest(
    "sim", 101, inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED, RoutePolicy(), 30.0
)
_REACHABLE = Load(total_tokens=1_000)


def _ref(name: str) -> WorkerRef:
    return WorkerRef(name, "i")


def _table(loads: dict[str, Load], layouts: dict[str, KvLayout] | None = None) -> LoadTable:
    table = LoadTable(
        Worker(_ref(name), f"{name}:1", "sim", 4_096, 10, (layouts or {}).get(name, LAYOUT))
        for name in loads
    )
    for name, load in loads.items():
        table.set(_ref(name), load)
    return table


def _choose(
    loads: dict[str, Load],
    cached: dict[str, int] | None = None,
    request: PlacementRequest = _REQUEST,
    queue_wait_s: float = 0.0,
    layouts: dict[str, KvLayout] | None = None,
) -> Decision:
    table = _table(loads, layouts)
    columns = np.array([(cached or {}).get(w.ref.worker_id, 0) for w in table.workers], float)
    candidates = Candidates(table, columns, _PULLING, queue_wait_s)
    return KvAware(Random(1)).choose(request, candidates)


def _policy(**fields: float) -> PlacementRequest:
    return replace(_REQUEST, policy=RoutePolicy(**fields))  # type: ignore[arg-type]


def test_only_matching_layouts_are_paired() -> None:
    other = {"d0": replace(LAYOUT, model="other")}
    paired = _choose({"d0": Load(), "d1": Load(held_tokens=900)}, layouts=other)
    assert (paired.worker.ref, paired.remote) == (_ref("d1"), True)
    alone = _choose({"d0": Load()}, layouts=other)
    assert not alone.remote
    assert "no prefill worker with a matching KV layout" in alone.explanation
    # A worker that computes the few missing tokens itself needs no prefill worker.
    near = replace(_REQUEST, policy=RoutePolicy(local_prefill_max_tokens=50))
    cached = _choose({"d0": Load(), "d1": Load(held_tokens=900)}, {"d0": 64}, near, layouts=other)
    assert (cached.worker.ref, cached.remote) == (_ref("d0"), False)


@pytest.mark.parametrize(
    ("change", "remote", "why"),
    [
        ({}, True, "policy"),
        ({"policy": RoutePolicy(local_prefill_max_tokens=101)}, False, "100 missing tokens are"),
        ({"policy": RoutePolicy(local_prefill_max_tokens=100)}, True, "policy"),
        ({"prefill_placement": inference_pb2.PREFILL_PLACEMENT_LOCAL}, False, "asked for"),
        (
            {
                "prefill_placement": inference_pb2.PREFILL_PLACEMENT_REMOTE,
                "policy": RoutePolicy(local_prefill_max_tokens=999, max_queue_wait_s=0.0),
            },
            True,
            "asked for",
        ),
        ({"prompt_tokens": 1}, False, "nothing to prefill"),
        ({"local_only": True}, False, "last resort"),
        ({"failed": frozenset({_PREFILL})}, False, "no prefill worker"),
        ({"policy": RoutePolicy(max_queue_wait_s=1.0)}, False, "2.00 s, more than 1.00 s"),
        ({"policy": RoutePolicy(max_queue_wait_s=3.0)}, True, "policy"),
        ({"remaining_s": 1.5}, False, "2.00 s, more than 1.50 s"),
    ],
)
def test_where_the_prompt_is_prefilled(change: dict[str, object], remote: bool, why: str) -> None:
    request = replace(_REQUEST, **change)  # type: ignore[arg-type]
    decision = _choose({"d0": Load()}, request=request, queue_wait_s=2.0)
    assert decision.remote is remote
    assert why in decision.explanation


def test_a_fully_cached_prompt_is_prefilled_locally() -> None:
    decision = _choose({"d0": Load()}, {"d0": 112})
    assert not decision.remote
    assert decision.candidates[0].cached_tokens == 100


def test_a_temperature_spreads_requests_over_cheap_workers() -> None:
    table = _table({"d0": Load(), "d1": Load(held_tokens=10), "d2": Load(held_tokens=100)})
    counts: dict[float, Counter[str]] = {}
    for temperature in (0.0, 0.3):
        placement = KvAware(Random(3))
        counts[temperature] = Counter(
            placement.choose(
                _policy(temperature=temperature), Candidates(table)
            ).worker.ref.worker_id
            for _ in range(1_000)
        )
    assert counts[0.0] == {"d0": 1_000}
    # Weights of exp(0), exp(-1/3) and exp(-10/3).
    assert counts[0.3]["d0"] == pytest.approx(571, abs=60)
    assert counts[0.3]["d1"] == pytest.approx(409, abs=60)
    assert 0 < counts[0.3]["d2"] < 60


def test_the_policy_of_the_registry_comes_with_its_defaults() -> None:
    assert RoutePolicy.from_proto(registry_pb2.Policy()) == RoutePolicy(0, 4.0, 0.0, None)
    policy = registry_pb2.Policy(
        local_prefill_max_tokens=5,
        overlap_weight=0.0,
        temperature=0.5,
        max_queue_wait=Duration(nanos=250_000_000),
    )
    assert RoutePolicy.from_proto(policy) == RoutePolicy(5, 0.0, 0.5, 0.25)


_LOADS = st.builds(
    Load,
    requests=st.integers(0, 12),
    held_tokens=st.integers(0, 400),
    reachable=st.booleans(),
    draining=st.sampled_from([False, False, True]),
)


@given(
    loads=st.lists(_LOADS, min_size=1, max_size=8),
    cached=st.lists(st.integers(0, 150), min_size=8, max_size=8),
    weight=st.sampled_from([0.0, 0.5, 1.0, 4.0]),
    suspects=st.sets(st.integers(0, 7)),
)
def test_no_fitter_or_cheaper_worker_is_passed_over(
    loads: list[Load], cached: list[int], weight: float, suspects: set[int]
) -> None:
    names = [f"d{i}" for i in range(len(loads))]
    by_name = dict(zip(names, loads, strict=True))
    request = replace(
        _policy(overlap_weight=weight), suspect=frozenset(_ref(f"d{i}") for i in suspects)
    )

    def unfit(name: str) -> tuple[bool, ...]:
        load = by_name[name]
        return (names.index(name) in suspects, not load.reachable, load.requests >= 10)

    def cost_s(name: str) -> float:
        """By the times of a generic worker, for an answer of one token."""
        load, missing = by_name[name], 100.0 - min(100, cached[names.index(name)])
        added_s = 100 * GENERIC_STEPS.s_per_context_token
        now_s = GENERIC_STEPS.fixed_s + load.held_tokens * GENERIC_STEPS.s_per_context_token
        prompt_s = missing * GENERIC_STEPS.s_per_prompt_token + MESSAGES_S * bool(missing)
        held_s = load.held_tokens * GENERIC_STEPS.s_per_prompt_token / 4
        return weight / 4 * prompt_s + 2 * (now_s + added_s) + max(load.requests * added_s, held_s)

    usable = [name for name in names if not by_name[name].draining]
    if not usable:
        with pytest.raises(NoDecodeWorker):
            _choose(by_name, request=request)
        return
    decision = _choose(by_name, dict(zip(names, cached, strict=False)), request)
    fit = [name for name in usable if unfit(name) == min(map(unfit, usable))]
    chosen = decision.worker.ref.worker_id
    assert chosen in fit
    assert cost_s(chosen) <= min(map(cost_s, fit)) + 1e-12


def test_only_workers_with_the_adapter_are_chosen() -> None:
    poet, other = Adapter("poet", "aa"), Adapter("poet", "bb")
    workers = [
        Worker(_ref(name), f"{name}:1", "sim", 4_096, 10, LAYOUT, adapters=frozenset(adapters))
        for name, adapters in (("a", ()), ("b", (poet, Adapter("coder", "cc"))), ("c", (other,)))
    ]
    table = LoadTable(workers)
    for worker in workers:
        # The worker with the adapter is the busiest one.
        table.set(
            worker.ref, replace(_REACHABLE, held_tokens=500 if worker.ref.worker_id == "b" else 0)
        )
    placement = KvAware(Random(1))
    request = replace(_REQUEST, adapter=poet)
    assert placement.choose(request, Candidates(table)).worker.ref == _ref("b")
    with pytest.raises(NoDecodeWorker, match="serves sim with adapter poet, less 1 that failed"):
        placement.choose(replace(request, failed=frozenset({_ref("b")})), Candidates(table))


def test_of_one_name_the_adapter_of_most_workers_is_served() -> None:
    first, second = Adapter("poet", "aa"), Adapter("poet", "bb")
    names = iter("abcde")

    def table(*adapters: Adapter) -> LoadTable:
        return LoadTable(
            Worker(_ref(next(names)), "a:1", "sim", 4_096, 10, LAYOUT, adapters=frozenset({one}))
            for one in adapters
        )

    assert table(first, second, second).adapters == {"poet": second}
    assert table(second, first).adapters == {"poet": first}


def test_a_pair_that_is_quarantined_leads_to_a_local_prefill() -> None:
    decision = _choose({"d0": _REACHABLE})
    other = WorkerRef("p1", "b")
    assert decision.remote
    assert decision.without_distrusted({_PREFILL}, {}) is decision
    assert decision.without_distrusted({_PREFILL}, {other: "why"}) is decision
    assert decision.without_distrusted({_PREFILL, other}, {_PREFILL: "layer 3"}) is decision
    planned = replace(decision, prefill=_PREFILL)
    assert planned.without_distrusted({_PREFILL, other}, {_PREFILL: "layer 3"}).prefill is None
    local = planned.without_distrusted({_PREFILL}, {_PREFILL: "layer 3", other: "layer 4"})
    assert (local.worker, local.remote, local.prefill) == (decision.worker, False, None)
    assert local.explanation.startswith(
        "local prefill: the worker accepts no KV (p0: layer 3); remote prefill: policy"
    )
    # A worker of both roles hands nothing over to itself.
    both = planned.without_distrusted({_PREFILL, decision.worker.ref}, {_PREFILL: "layer 3"})
    assert not both.remote
