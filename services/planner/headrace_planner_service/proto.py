"""The planner's values as messages. Pure."""

from __future__ import annotations

from typing import Final

from headrace.planner.v1 import planner_pb2
from headrace_common.durations import duration_from_seconds, timestamp_from_unix_s
from headrace_planner.observation import Reason, WorkerCounts
from headrace_planner_service.decisions import DecisionEntry, Outcome
from headrace_planner_service.targets import Target

_OUTCOMES: Final = {
    outcome: planner_pb2.Decision.Outcome.Value(f"OUTCOME_{outcome.name}") for outcome in Outcome
}


def counts_to_proto(counts: WorkerCounts) -> planner_pb2.WorkerCounts:
    """Numbers of workers."""
    return planner_pb2.WorkerCounts(prefill=counts.prefill, decode=counts.decode)


def target_to_proto(target: Target) -> planner_pb2.Target:
    """A target."""
    return planner_pb2.Target(
        id=target.id,
        workers=counts_to_proto(target.counts),
        decide_time=timestamp_from_unix_s(target.decided_unix_s),
        current=counts_to_proto(target.current),
    )


def decision_to_proto(entry: DecisionEntry) -> planner_pb2.Decision:
    """A decision with its reasons."""
    return planner_pb2.Decision(
        number=entry.number,
        start_time=timestamp_from_unix_s(entry.start_unix_s),
        duration=duration_from_seconds(entry.duration_s),
        current=counts_to_proto(entry.decision.current),
        target=counts_to_proto(entry.decision.target),
        outcome=_OUTCOMES[entry.outcome],
        detail=entry.detail,
        reasons=map(_reason_to_proto, entry.decision.reasons),
    )


def _reason_to_proto(reason: Reason) -> planner_pb2.Reason:
    return planner_pb2.Reason(
        role=reason.role,
        rule=reason.rule,
        count=reason.count,
        inputs=dict(reason.inputs),
        sentence=reason.sentence,
    )
