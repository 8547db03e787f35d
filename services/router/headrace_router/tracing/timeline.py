"""The steps of one attempt on the router's clock, with those that its workers report. Its spans are made from them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Final

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import first_token_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.latency.clocks import ClockDifference, ClockOffset
from headrace_common.latency.steps import (
    AttemptSteps,
    DecodeSteps,
    FirstTokenBy,
    PrefillSteps,
    decode_steps,
    prefill_steps,
)
from headrace_frontend.running.timeline import now_us
from headrace_kv.layout import WorkerRef
from headrace_router.decode_link.answer import LinkedAnswer
from headrace_router.prefill_queue.task import QueuedTask, TaskOutcome
from headrace_router.tracing.request_record import AttemptFacts
from headrace_router.tracing.worker_clocks import WorkerClocks, difference_now

_MAKERS: Final = {
    first_token_pb2.FIRST_TOKEN_POLICY_PREFILL: FirstTokenBy.PREFILL,
    first_token_pb2.FIRST_TOKEN_POLICY_HIDDEN: FirstTokenBy.HIDDEN,
}


class AttemptTimeline:
    """The steps of one attempt, from the choice of its workers on."""

    def __init__(self, clocks: WorkerClocks) -> None:
        self.route_start_us = now_us()
        self.facts = AttemptFacts()
        """What its spans show beside the steps."""
        self.differences: dict[str, ClockDifference] = {}
        """How far the clocks of the workers that have reported are ahead, by worker id."""
        self._clocks = clocks
        self._decode_worker_id = ""
        self._answer: LinkedAnswer | None = None
        self._queued: QueuedTask | None = None
        self._remote = False
        self._first_token_by = FirstTokenBy.DECODE
        self._start_ns = 0
        self._reserved_exchange = False
        self._task_exchange = False

    @property
    def outcome(self) -> asyncio.Future[TaskOutcome] | None:
        """The outcome of its prefill task, which has the prefill worker's report."""
        return self._queued.outcome if self._queued is not None else None

    def opened(
        self,
        worker: WorkerRef,
        answer: LinkedAnswer,
        *,
        remote: bool,
        first_token: first_token_pb2.FirstTokenPolicy.ValueType,
    ) -> None:
        """The decode worker is asked."""
        self._start_ns = time.monotonic_ns()
        self._decode_worker_id, self._answer = worker.worker_id, answer
        self._remote = remote
        self._first_token_by = _MAKERS.get(first_token, FirstTokenBy.DECODE)

    def queued(self, task: QueuedTask) -> None:
        """The prompt is in the prefill queue."""
        self._queued = task

    def collect(self) -> AttemptSteps:
        """The steps that are known now."""
        answer, queued = self._answer, self._queued
        reserved_ns = answer.reserved_ns if answer is not None else 0
        decode = self._decode_steps(answer) if answer is not None else None
        prefill = self._prefill_steps(queued) if queued is not None else None
        errors_ns = (one.error_ns for one in self.differences.values())
        return AttemptSteps(
            route_start=self.route_start_us,
            start=_us_or_none(self._start_ns),
            reserved=_us_or_none(queued.queued_ns if queued is not None else reserved_ns),
            queued=_us_or_none(queued.queued_ns) if queued is not None else None,
            pulled=_us_or_none(queued.pulled_ns) if queued is not None else None,
            remote=self._remote,
            first_token_by=self._first_token_by,
            decode=decode,
            prefill=prefill,
            error_us=max(errors_ns, default=0) // 1_000,
        )

    def _decode_steps(self, answer: LinkedAnswer) -> DecodeSteps | None:
        times = answer.times
        if times is None:
            return None
        clock = self._clocks.clock(self._decode_worker_id)
        if not self._reserved_exchange:
            self._reserved_exchange = True
            replied_ns = times.received_unix_ns + 1_000 * times.reserved_us
            clock.add_exchange(
                sent_ns=self._start_ns,
                received_ns=times.received_unix_ns,
                replied_ns=replied_ns,
                answered_ns=answer.reserved_ns,
            )
        return decode_steps(times, self._received_us(clock, self._decode_worker_id, times))

    def _prefill_steps(self, queued: QueuedTask) -> PrefillSteps | None:
        if queued.worker is None or not queued.pulled_ns:
            return None
        done = queued.outcome.result().done if queued.outcome.done() else None
        first = queued.first_token.result() if queued.first_token.done() else None
        report = done if done is not None and done.HasField("times") else first
        if report is None or not report.HasField("times"):
            return None
        self.facts.done = done
        times, worker_id = report.times, queued.worker.worker_id
        clock = self._clocks.clock(worker_id)
        if not self._task_exchange and report is done:
            self._task_exchange = True
            replied_ns = times.received_unix_ns + 1_000 * times.sent_us
            clock.add_exchange(
                sent_ns=queued.pulled_ns,
                received_ns=times.received_unix_ns,
                replied_ns=replied_ns,
                answered_ns=queued.ended_ns,
            )
        if not clock.known:
            return None
        received_us = self._received_us(clock, worker_id, times)
        steps = prefill_steps(times, received_us)
        if first is None:
            return steps
        return replace(steps, sent=received_us + first.times.sent_us)

    def _received_us(
        self,
        clock: ClockOffset,
        worker_id: str,
        times: decode_pb2.AttemptTimes | prefill_pb2.TaskTimes,
    ) -> int:
        self.differences[worker_id] = difference_now(clock)
        return clock.ours_ns(times.received_unix_ns) // 1_000


def _us_or_none(time_ns: int) -> int | None:
    return time_ns // 1_000 if time_ns else None
