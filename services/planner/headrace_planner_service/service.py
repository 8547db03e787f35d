"""The loop of decisions, and PlannerService: the decisions for operators, and targets for another process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import grpc.aio

from headrace.planner.v1 import planner_pb2, planner_pb2_grpc
from headrace_common.durations import duration_from_seconds, timestamp_from_unix_s
from headrace_common.errors import ConfigError, HeadraceError, InvalidRequest
from headrace_planner.observation import Interval, LoadSample, Reason, WorkerCounts
from headrace_planner.settings import WorkerProfile
from headrace_planner_service.config import PlannerConfig
from headrace_planner_service.observer import Observer, Reading, Totals, request_statistics
from headrace_planner_service.steering import DecisionEntry, Outcome, Steering, Target

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Collected:
    """What was read within one interval."""

    start_unix_s: float
    started_s: float
    samples: list[LoadSample] = field(default_factory=list)
    profile: WorkerProfile | None = None
    fault: str = ""

    def add(self, reading: Reading) -> None:
        self.samples.append(reading.sample)
        self.profile = reading.profile

    def miss(self, fault: str) -> None:
        self.fault = fault


class PlanningLoop:
    """Runs until it is cancelled. `on_decision` and `on_miss` are for metrics and traces."""

    def __init__(
        self,
        config: PlannerConfig,
        observer: Observer,
        steering: Steering,
        on_decision: Callable[[DecisionEntry], None],
        on_miss: Callable[[], None],
    ) -> None:
        self._config = config
        self._observer = observer
        self._steering = steering
        self._on_decision = on_decision
        self._on_miss = on_miss
        self._sample_count = round(config.interval_s / config.sample_interval_s)
        # The sums at the end of the last interval, and the latest ones.
        self._before: Totals | None = None
        self._latest: Totals = {}
        self.last_sample: LoadSample | None = None
        """The last complete observation."""
        self.fault = ""
        """Why the latest observation was not complete. Empty when it was."""

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self.run_interval()

    async def run_interval(self) -> DecisionEntry:
        """Samples one interval and decides."""
        collected = _Collected(time.time(), time.monotonic())
        for number in range(1, self._sample_count + 1):
            due_s = collected.started_s + number * self._config.interval_s / self._sample_count
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await self._sample(collected)
        entry = self._decide(collected, time.monotonic() - collected.started_s)
        _LOG.info("decision %d: %s", entry.number, entry.text)
        self._on_decision(entry)
        return entry

    async def _sample(self, collected: _Collected) -> None:
        try:
            reading: Reading = await self._observer.read()
        except HeadraceError as error:
            if error.detail != self.fault:
                _LOG.warning("the load could not be observed: %s", error.detail)
            self.fault = error.detail
            collected.miss(error.detail)
            self._on_miss()
            return
        self.fault = ""
        self.last_sample = reading.sample
        self._latest = reading.totals
        if self._before is None:
            self._before = reading.totals
        collected.add(reading)

    def _decide(self, collected: _Collected, duration_s: float) -> DecisionEntry:
        if 2 * len(collected.samples) < self._sample_count or self._before is None:
            return self._steering.skip_interval(
                collected.start_unix_s, duration_s, f"Not decided: {collected.fault}."
            )
        requests = request_statistics(self._before, self._latest)
        self._before = self._latest
        interval = Interval(
            collected.start_unix_s,
            duration_s,
            tuple(collected.samples),
            requests,
            collected.profile,
        )
        return self._steering.end_interval(interval)


_OUTCOMES: Final = {
    outcome: planner_pb2.Decision.Outcome.Value(f"OUTCOME_{outcome.name}") for outcome in Outcome
}


def counts_to_proto(counts: WorkerCounts) -> planner_pb2.WorkerCounts:
    """Numbers of workers."""
    return planner_pb2.WorkerCounts(prefill=counts.prefill, decode=counts.decode, both=counts.both)


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


_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_PAGE_SIZE_MAX: Final = 1_000
_PAGE_SIZE_DEFAULT: Final = 20
_TOKEN_DIGITS_MAX: Final = 18
_FAILURE_CHARACTERS_MAX: Final = 1_000
_TARGET_ID_CHARACTERS_MAX: Final = 64
_MODES: Final = {
    "advise": planner_pb2.GetStatusResponse.MODE_ADVISE,
    "publish": planner_pb2.GetStatusResponse.MODE_PUBLISH,
    "kubernetes": planner_pb2.GetStatusResponse.MODE_KUBERNETES,
}


class PlannerServicer(planner_pb2_grpc.PlannerServiceServicer):
    """The gRPC side of a planner."""

    def __init__(self, config: PlannerConfig, loop: PlanningLoop, steering: Steering) -> None:
        self._config = config
        self._loop = loop
        self._steering = steering

    async def GetStatus(
        self, request: planner_pb2.GetStatusRequest, context: _Context
    ) -> planner_pb2.GetStatusResponse:
        sample, target = self._loop.last_sample, self._steering.board.target
        return planner_pb2.GetStatusResponse(
            model=self._config.model,
            mode=_MODES[self._config.mode],
            current=counts_to_proto(sample.counts) if sample is not None else None,
            target=target_to_proto(target) if target is not None else None,
            interval=duration_from_seconds(self._config.interval_s),
            observation_fault=self._loop.fault,
        )

    async def ListDecisions(
        self, request: planner_pb2.ListDecisionsRequest, context: _Context
    ) -> planner_pb2.ListDecisionsResponse:
        violations: dict[str, str] = {}
        token = request.page_token
        if request.page_size > _PAGE_SIZE_MAX:
            violations["page_size"] = f"give 1 to {_PAGE_SIZE_MAX}, or 0 for {_PAGE_SIZE_DEFAULT}"
        if token and not (
            token.isascii() and token.isdecimal() and len(token) <= _TOKEN_DIGITS_MAX
        ):
            violations["page_token"] = "give the next_page_token of a previous response, or none"
        if violations:
            raise InvalidRequest(violations)
        size = request.page_size or _PAGE_SIZE_DEFAULT
        found = self._steering.decisions.page(int(token or 0), size + 1)
        page = found[:size]
        return planner_pb2.ListDecisionsResponse(
            decisions=map(decision_to_proto, page),
            next_page_token=str(page[-1].number) if len(found) > size else "",
        )

    async def WatchTargets(
        self, request: planner_pb2.WatchTargetsRequest, context: _Context
    ) -> AsyncIterator[planner_pb2.WatchTargetsResponse]:
        self._steering.require_publishing()
        seen_id = ""
        while True:
            target = await self._steering.board.wait_other(seen_id)
            seen_id = target.id
            yield planner_pb2.WatchTargetsResponse(target=target_to_proto(target))

    async def AcknowledgeTarget(
        self, request: planner_pb2.AcknowledgeTargetRequest, context: _Context
    ) -> planner_pb2.AcknowledgeTargetResponse:
        violations: dict[str, str] = {}
        if not 0 < len(request.target_id) <= _TARGET_ID_CHARACTERS_MAX:
            violations["target_id"] = "give the id of a target that WatchTargets sent"
        if len(request.failure) > _FAILURE_CHARACTERS_MAX:
            violations["failure"] = f"give at most {_FAILURE_CHARACTERS_MAX} characters"
        if violations:
            raise InvalidRequest(violations)
        if self._config.mode == "kubernetes":
            raise ConfigError(
                "the planner carries its targets out itself: start it with mode publish for another process to do so"
            )
        self._steering.acknowledge(request.target_id, request.failure)
        return planner_pb2.AcknowledgeTargetResponse()
