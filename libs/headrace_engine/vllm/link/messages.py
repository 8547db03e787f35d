"""Converts values of headrace_kv to and from the link's messages, and keeps the error of a failed start."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.engine.v1 import link_pb2
from headrace_common.durations import duration_from_seconds, seconds_from_duration
from headrace_common.errors import HeadraceError, from_reason
from headrace_common.time_model.model import (
    NO_STEPS,
    StepTimes,
    step_times_from_proto,
    step_times_to_proto,
)
from headrace_engine.interface import (
    Arrived,
    FirstToken,
    LayersArrived,
    Recompute,
    Released,
    TransferEvent,
)
from headrace_engine.proto import device_time_from_proto, device_time_to_proto
from headrace_engine.steps import EngineSteps
from headrace_kv.messages import SendReport
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.load_times import TierLoad
from headrace_kv.tiers.promises import NO_PROMISES, KeepTerms, Kept, PromiseCounts


def _file(link_path: Path) -> Path:
    return link_path.with_name("failure.json")


def write_startup_error(link_path: Path, error: HeadraceError) -> None:
    """Stores the error for `read_startup_error`, unless there is one already."""
    file = _file(link_path)
    if not file.exists():
        file.write_text(
            json.dumps(
                {"reason": error.reason, "detail": error.detail, "metadata": error.metadata}
            ),
            encoding="utf-8",
        )


def read_startup_error(link_path: Path) -> HeadraceError | None:
    """The stored error, or None."""
    try:
        stored = json.loads(_file(link_path).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return from_reason(stored["reason"], stored["detail"], metadata=stored["metadata"])


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests in the batch and outside it. KV blocks that requests hold, all blocks that they can hold, the times of
    steps, and the promises to keep KV.
    """

    running_requests: int = 0
    waiting_requests: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    step_times: StepTimes = NO_STEPS
    promises: PromiseCounts = NO_PROMISES


def load_to_proto(load: EngineLoad) -> link_pb2.EngineLoad:
    return link_pb2.EngineLoad(
        **_values(load, _LOAD_FIELDS),
        step_times=step_times_to_proto(load.step_times),
        promises=link_pb2.Promises(
            count=load.promises.promises,
            broken_count=load.promises.broken,
            blocks=[
                link_pb2.PromisedBlocks(tier=tier, count=count)
                for tier, count in load.promises.blocks.items()
            ],
        ),
    )


def load_from_proto(message: link_pb2.EngineLoad) -> EngineLoad:
    return EngineLoad(
        **_values(message, _LOAD_FIELDS),
        step_times=step_times_from_proto(message.step_times),
        promises=PromiseCounts(
            message.promises.count,
            {Tier(one.tier): one.count for one in message.promises.blocks},
            message.promises.broken_count,
        ),
    )


def terms_to_proto(terms: KeepTerms) -> link_pb2.KeepQuery:
    return link_pb2.KeepQuery(
        transfer_id=terms.name, owner=terms.owner, duration=duration_from_seconds(terms.seconds)
    )


def terms_from_proto(query: link_pb2.KeepQuery) -> KeepTerms:
    return KeepTerms(query.transfer_id, query.owner, seconds_from_duration(query.duration))


def keep_answer(kept: Kept | None) -> link_pb2.KeepAnswer:
    """`kept` is None for an unknown promise."""
    if kept is None:
        return link_pb2.KeepAnswer()
    return link_pb2.KeepAnswer(
        found=True,
        token_count=kept.tokens,
        tier=kept.tier,
        duration=duration_from_seconds(kept.seconds),
    )


def kept_from_proto(answer: link_pb2.KeepAnswer) -> Kept | None:
    """None for an unknown promise."""
    if not answer.found:
        return None
    return Kept(answer.token_count, Tier(answer.tier), seconds_from_duration(answer.duration))


def steps_to_proto(steps: EngineSteps) -> link_pb2.EngineSteps:
    expected_s = steps.expected_s
    return link_pb2.EngineSteps(
        count=steps.count,
        request_count=steps.requests,
        token_count=steps.tokens,
        expected=None if expected_s is None else duration_from_seconds(expected_s),
        device_time=device_time_to_proto(steps.time),
    )


def steps_from_proto(message: link_pb2.EngineSteps) -> EngineSteps:
    known = message.HasField("expected")
    return EngineSteps(
        count=message.count,
        requests=message.request_count,
        tokens=message.token_count,
        expected_s=seconds_from_duration(message.expected) if known else None,
        time=device_time_from_proto(message.device_time),
    )


def report_to_proto(report: SendReport) -> link_pb2.SendReport:
    return link_pb2.SendReport(**_values(report, _REPORT_FIELDS), links=report.links)


def report_from_proto(message: link_pb2.SendReport) -> SendReport:
    return SendReport(**_values(message, _REPORT_FIELDS), links=tuple(message.links))


def tier_load_to_proto(load: TierLoad) -> link_pb2.TierLoaded:
    return link_pb2.TierLoaded(
        tier=load.tier,
        block_count=load.block_count,
        time=duration_from_seconds(load.seconds),
        failed=load.failed,
    )


def tier_load_from_proto(message: link_pb2.TierLoaded) -> TierLoad:
    load_s = seconds_from_duration(message.time)
    return TierLoad(Tier(message.tier), message.block_count, load_s, message.failed)


_EVENT_KINDS: dict[type[TransferEvent], link_pb2.TransferEvent.Kind.ValueType] = {
    Arrived: link_pb2.TransferEvent.KIND_ARRIVED,
    Released: link_pb2.TransferEvent.KIND_RELEASED,
    Recompute: link_pb2.TransferEvent.KIND_RECOMPUTE,
    FirstToken: link_pb2.TransferEvent.KIND_FIRST_TOKEN,
    LayersArrived: link_pb2.TransferEvent.KIND_LAYERS_ARRIVED,
}


def transfer_event_to_proto(event: TransferEvent) -> link_pb2.TransferEvent:
    """Hidden states have no message: the service samples from them."""
    return link_pb2.TransferEvent(
        transfer_id=event.transfer_id,
        kind=_EVENT_KINDS[type(event)],
        token_id=event.token_id if isinstance(event, FirstToken) else 0,
        layer_count=event.layer_count if isinstance(event, LayersArrived) else 0,
    )


# Fields that have the same name and type on both sides.
_LOAD_FIELDS = ("running_requests", "waiting_requests", "used_blocks", "total_blocks")
_REPORT_FIELDS = ("transfer_id", "rank", "reason", "detail", "control_bytes", "host", "memory")


def _values(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}
