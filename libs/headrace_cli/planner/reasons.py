"""The reasons of a planner's decision, for programs."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.planner.v1 import planner_pb2
from headrace_cli.records import ReasonRecord
from headrace_planner.observation import Reason


def reason_records(reasons: Iterable[Reason] | Iterable[planner_pb2.Reason]) -> list[ReasonRecord]:
    """A record of each reason, in their order."""
    return [
        ReasonRecord(
            role=reason.role,
            rule=reason.rule,
            count=reason.count,
            inputs=dict(reason.inputs),
            sentence=reason.sentence,
        )
        for reason in reasons
    ]
