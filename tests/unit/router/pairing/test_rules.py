"""The policy for pairs of places, and measured hand-overs between them."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.registry.v1 import registry_pb2
from headrace_common.registry.place import Level, Place
from headrace_router.pairing.rules import LinkTimes, PairRules, cheapest_pair_cost, pair_cost

A, B, C = Place("a"), Place("b"), Place("c")
PLACES = st.sampled_from([A, B, C, None])
PREFER = PairRules(Level.ZONE)
REQUIRE = PairRules(Level.ZONE, required=True)
RULES = st.sampled_from([PairRules(), PREFER, REQUIRE])
RECORDS = st.lists(st.tuples(PLACES, PLACES, st.floats(0, 2)), max_size=12)


def measured(*records: tuple[Place | None, Place | None, float]) -> LinkTimes:
    links, seconds = LinkTimes(), count()
    for prefill, decode, lag_s in records:
        links.record(prefill, decode, tokens=100, lag_s=lag_s, now_s=float(next(seconds)))
    return links


def test_a_policy_becomes_rules() -> None:
    assert PairRules.from_proto(registry_pb2.Policy()) == PairRules(Level.NONE, False, 0.5)
    policy = registry_pb2.Policy(
        pair_level=registry_pb2.PAIR_LEVEL_RACK,
        pair_rule=registry_pb2.PAIR_RULE_REQUIRE,
        far_weight=0.0,
    )
    assert PairRules.from_proto(policy) == PairRules(Level.RACK, True, 0.0)


@given(RULES, PLACES, PLACES)
def test_only_the_rule_require_excludes_pairs(
    rules: PairRules, prefill: Place | None, decode: Place | None
) -> None:
    shared = prefill is not None and prefill == decode
    assert rules.allow(prefill, decode) == (rules is not REQUIRE or shared)


@given(RULES, RECORDS, st.floats(0, 1), st.frozensets(PLACES), PLACES)
def test_the_cheapest_pair_is_the_least_of_all_allowed(
    rules: PairRules,
    records: list[tuple[Place | None, Place | None, float]],
    compute_s: float,
    prefills: frozenset[Place | None],
    decode: Place | None,
) -> None:
    links = measured(*records)
    costs = [
        pair_cost(rules, links, compute_s, one, decode)
        for one in prefills
        if rules.allow(one, decode)
    ]
    found = cheapest_pair_cost(rules, links, compute_s, prefills, decode)
    assert found == min(costs, default=None)


def test_the_cheapest_of_several_measured_pairs_is_found() -> None:
    places = [Place(zone) for zone in "acde"]
    for cheapest in places:
        links = measured(*((one, B, 1.0 if one == cheapest else 5.0) for one in places))
        assert cheapest_pair_cost(PREFER, links, 0.01, {*places, None}, B) == pytest.approx(1.5)


@given(st.lists(st.floats(0, 3), min_size=1, max_size=20))
def test_a_lag_lies_between_those_that_were_measured(lags_s: list[float]) -> None:
    links = measured(*((A, B, lag_s) for lag_s in lags_s))
    tolerance_s = 1e-9
    found = links.s_per_token(A, B) * 100
    assert min(lags_s) - tolerance_s <= found <= max(lags_s) + tolerance_s


def test_new_measurements_replace_old_ones() -> None:
    links = LinkTimes()
    links.record(A, B, tokens=100, lag_s=9.0, now_s=0.0)
    links.record(A, B, tokens=100, lag_s=1.0, now_s=3_600.0)
    assert links.s_per_token(A, B) == pytest.approx(0.01)


def test_the_number_of_measured_pairs_is_bounded() -> None:
    links = LinkTimes(pairs_max=2)
    for prefill in (A, B, C):
        links.record(prefill, A, tokens=10, lag_s=1.0, now_s=0.0)
    assert links.measured(A) == {B, C}
    assert not links.measured(B)
    links.record(A, A, tokens=0, lag_s=1.0, now_s=0.0)
    assert links.measured(A) == {B, C}
