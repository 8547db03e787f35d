"""The regret of a request: its observed first token beside the estimates of other decisions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_common.latency.steps import BY_PREFILL, DecodeSteps, PrefillSteps
from headrace_common.telemetry import schema
from headrace_kv.layout import WorkerRef
from headrace_router.costs import OtherDecision
from headrace_router.tracing.attempt_record import Regret, RoutedAttempt, regret_of
from tests.unit.router.tracing.records import attempt, ended

WORKER: Any = SimpleNamespace(ref=WorkerRef("w1", "i"), model="m")
LATER = OtherDecision("remote prefill", WORKER, WorkerRef("w2", "i"), 0.9, after_prompt=False)
EARLIER = OtherDecision("local prefill", WORKER, WORKER.ref, 0.190, after_prompt=False)
BY_OBSERVED = OtherDecision("other decode worker", WORKER, WORKER.ref, -0.1, after_prompt=True)


def regret(*others: OtherDecision, remote: bool = False, **steps: Any) -> Regret | None:
    """Of a request with such a decision. The first token comes 500 ms after the worker has the request."""
    decode = DecodeSteps(1_000, first_token=501_000)
    placed: Any = SimpleNamespace(others=others, remote=remote, prefill=None)
    return regret_of(ended(RoutedAttempt(0, **{"decode": decode, "decision": placed} | steps)))


def test_the_best_other_decision_is_compared_with_what_was_observed() -> None:
    best = regret(LATER, EARLIER, BY_OBSERVED)
    assert best is not None
    assert best.other == EARLIER
    assert best.gained_s == pytest.approx(0.310)
    # After a local prefill it counts from the first token, else from the end of computing.
    local = regret(BY_OBSERVED)
    assert local is not None
    assert local.gained_s == pytest.approx(0.1)
    computed = PrefillSteps(3_000, compute_end=401_000)
    remote = regret(replace(BY_OBSERVED, first_s=0.03), remote=True, prefill=computed)
    assert remote is not None
    assert remote.gained_s == pytest.approx(0.5 - 0.43)
    assert regret(BY_OBSERVED, remote=True) is None
    worse = regret(LATER)
    assert worse is not None
    assert worse.gained_s == pytest.approx(-0.4)


def test_there_is_no_estimate_where_the_decision_or_its_outcome_is_another_one() -> None:
    assert regret() is None
    assert regret(EARLIER, first_token_by=BY_PREFILL) is None
    assert regret(EARLIER, decode=None) is None
    assert regret(EARLIER, decision=None) is None
    assert regret_of(ended()) is None
    twice = attempt(remote=False)
    assert twice.decision is not None
    twice.decision.others = (EARLIER,)
    assert regret_of(ended(twice)) is not None
    assert regret_of(ended(twice, twice)) is None


def test_the_root_has_the_best_other_decision_unless_another_worker_took_the_prompt() -> None:
    facts = attempt(remote=True)
    decision: Any = facts.decision
    decision.others, decision.prefill = (EARLIER,), WorkerRef("prefill-0", "i")
    root = next(ended(facts).spans())
    assert root.attributes is not None
    assert root.attributes[schema.ATTRIBUTE_OTHER_DECISION] == "local prefill"
    assert root.attributes[schema.ATTRIBUTE_OTHER_DECODE_WORKER_ID] == "w1"
    assert root.attributes[schema.ATTRIBUTE_OTHER_PREFILL_WORKER_ID] == "w1"
    assert isinstance(root.attributes[schema.ATTRIBUTE_OTHER_GAIN_MS], float)
    decision.prefill = WorkerRef("prefill-1", "i")
    assert regret_of(ended(facts)) is None
