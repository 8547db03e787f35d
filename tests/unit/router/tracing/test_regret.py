"""The regret of a request: its observed first token beside the estimates of other decisions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_common.latency.steps import (
    AttemptSteps,
    DecodeSteps,
    FirstTokenBy,
    PrefillSteps,
    RequestSteps,
)
from headrace_common.telemetry import schema
from headrace_kv.layout import WorkerRef
from headrace_router.costs import OtherDecision
from headrace_router.tracing.request_record import regret_of
from tests.unit.router.tracing.records import attempt, ended

WORKER: Any = SimpleNamespace(ref=WorkerRef("w1", "i"), model="m")
LATER = OtherDecision("remote prefill", WORKER, WorkerRef("w2", "i"), 0.9, after_prompt=False)
EARLIER = OtherDecision("local prefill", WORKER, WORKER.ref, 0.190, after_prompt=False)
BY_OBSERVED = OtherDecision("other decode worker", WORKER, WORKER.ref, -0.1, after_prompt=True)
# The first token comes 500 ms after the worker has the request.
ATTEMPT = AttemptSteps(route_start=0, decode=DecodeSteps(1_000, first_token=501_000))
STEPS = RequestSteps(arrival=0, attempts=(ATTEMPT,))


def placed(*others: OtherDecision, remote: bool = False) -> Any:
    return SimpleNamespace(others=others, remote=remote)


def test_the_best_other_decision_is_compared_with_what_was_observed() -> None:
    regret = regret_of(placed(LATER, EARLIER, BY_OBSERVED), STEPS)
    assert regret is not None
    assert regret.other == EARLIER
    assert regret.gained_s == pytest.approx(0.310)
    assert regret.attributes() == {
        schema.ATTRIBUTE_OTHER_DECISION: "local prefill",
        schema.ATTRIBUTE_OTHER_DECODE_WORKER_ID: "w1",
        schema.ATTRIBUTE_OTHER_PREFILL_WORKER_ID: "w1",
        schema.ATTRIBUTE_OTHER_GAIN_MS: pytest.approx(310.0),
    }
    # After a local prefill it counts from the first token, else from the end of computing.
    local = regret_of(placed(BY_OBSERVED), STEPS)
    assert local is not None
    assert local.gained_s == pytest.approx(0.1)
    computed = PrefillSteps(3_000, compute_end=401_000)
    steps = replace(STEPS, attempts=(replace(ATTEMPT, prefill=computed),))
    remote = regret_of(placed(replace(BY_OBSERVED, first_s=0.03), remote=True), steps)
    assert remote is not None
    assert remote.gained_s == pytest.approx(0.5 - 0.43)
    assert regret_of(placed(BY_OBSERVED, remote=True), STEPS) is None
    worse = regret_of(placed(LATER), STEPS)
    assert worse is not None
    assert worse.gained_s == pytest.approx(-0.4)


def test_there_is_no_estimate_where_the_decision_or_its_outcome_is_another_one() -> None:
    by_prefill = replace(ATTEMPT, first_token_by=FirstTokenBy.PREFILL)
    for steps in (
        replace(STEPS, attempts=(ATTEMPT, ATTEMPT)),
        replace(STEPS, attempts=(by_prefill,)),
        replace(STEPS, attempts=(replace(ATTEMPT, decode=None),)),
        replace(STEPS, attempts=()),
    ):
        assert regret_of(placed(EARLIER), steps) is None
    assert regret_of(placed(), STEPS) is None
    assert regret_of(None, STEPS) is None


def test_the_root_has_the_best_other_decision_unless_another_worker_took_the_prompt() -> None:
    facts = attempt(remote=True)
    decision: Any = facts.decision
    decision.others, decision.prefill = (EARLIER,), WorkerRef("prefill-0", "i")
    root = ended(attempts=(facts,)).spans()[0]
    assert root.attributes is not None
    assert root.attributes[schema.ATTRIBUTE_OTHER_DECISION] == "local prefill"
    decision.prefill = WorkerRef("prefill-1", "i")
    assert ended(attempts=(facts,)).regret is None
