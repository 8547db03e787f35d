"""The steps of one request on the router's clock, with those that its workers report. Its spans are made from them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import first_token_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.deadlines import Deadline
from headrace_common.latency.breakdown import Breakdown, break_down
from headrace_common.latency.clocks import ClockOffset
from headrace_common.latency.report import call_when_reported, wait_for_report
from headrace_common.latency.steps import (
    AttemptSteps,
    DecodeSteps,
    FirstTokenBy,
    PrefillSteps,
    RequestSteps,
    decode_steps,
    prefill_steps,
)
from headrace_frontend.request.response_stream import ResponseStream
from headrace_kv.layout.layout import WorkerRef
from headrace_router.decode_link.answer import LinkedAnswer
from headrace_router.prefill_queue.task import QueuedTask, TaskOutcome
from headrace_router.tracing.request_record import AttemptFacts
from headrace_router.tracing.worker_clocks import ClockDifference, WorkerClocks, difference_now

_MAKERS: Final = {
    first_token_pb2.FIRST_TOKEN_POLICY_PREFILL: FirstTokenBy.PREFILL,
    first_token_pb2.FIRST_TOKEN_POLICY_LOGITS: FirstTokenBy.LOGITS,
}


class AttemptTimeline:
    """The steps of one attempt, from the choice of its workers on."""

    def __init__(self, clocks: WorkerClocks) -> None:
        self.route_start_us = _now_us()
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
        decode = self._decode_steps(answer) if answer is not None else None
        prefill = self._prefill_steps(queued) if queued is not None else None
        errors_ns = (one.error_ns for one in self.differences.values())
        return AttemptSteps(
            route_start=self.route_start_us,
            start=_us_or_none(self._start_ns),
            reserved=_us_or_none(answer.reserved_ns) if answer is not None else None,
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
                *(self._start_ns, times.received_unix_ns, replied_ns, answer.reserved_ns)
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
                *(queued.pulled_ns, times.received_unix_ns, replied_ns, queued.ended_ns)
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


class RequestTimeline:
    """The steps of one request. One event loop owns it."""

    def __init__(
        self,
        clocks: WorkerClocks | None = None,
        arrival_ns: int = 0,
        arrival_unix_ns: int = 0,
    ) -> None:
        """`arrival_ns` is by the monotonic clock; 0 means now. `arrival_unix_ns` is the same moment."""
        self._clocks = clocks or WorkerClocks()
        self.arrival_ns = arrival_ns or time.monotonic_ns()
        self.arrival_unix_ns = arrival_unix_ns or time.time_ns()
        self._arrival_us = self.arrival_ns // 1_000
        self._tokenize: list[tuple[int, int]] = []
        self._slot_wait: tuple[int, int] | None = None
        self._attempts: list[AttemptTimeline] = []
        self._response: ResponseStream | None = None

    @property
    def response(self) -> ResponseStream | None:
        """The response, once the request was admitted and prepared."""
        return self._response

    def tokenized(self, interval_ns: tuple[int, int]) -> None:
        """The prompt became tokens within this interval of the monotonic clock."""
        start_ns, end_ns = interval_ns
        self._tokenize.append((start_ns // 1_000, end_ns // 1_000))

    def slot_acquired(self, start_ns: int) -> None:
        """The request has a slot of the decode workers, for which it has waited since `start_ns`."""
        self._slot_wait = start_ns // 1_000, _now_us()

    def responding(self, response: ResponseStream) -> None:
        """`response` gets the tokens."""
        self._response = response

    def attempt_started(self) -> AttemptTimeline:
        """The choice of workers for another attempt begins."""
        attempt = AttemptTimeline(self._clocks)
        self._attempts.append(attempt)
        return attempt

    def differences(self) -> dict[str, ClockDifference]:
        """How far the clocks of the request's workers are ahead, by worker id. Follows `break_down`."""
        found: dict[str, ClockDifference] = {}
        for attempt in self._attempts:
            found |= attempt.differences
        return found

    @property
    def attempts(self) -> tuple[AttemptFacts, ...]:
        """The attempts, oldest first."""
        return tuple(attempt.facts for attempt in self._attempts)

    def break_down(self) -> Breakdown:
        """The sums, from the steps that are known now. Without a first token, the first one lasts until now."""
        return break_down(self.steps(), _now_us())

    def steps(self) -> RequestSteps:
        """The steps that are known now."""
        response = self._response
        first: tuple[int, int] | None = None
        second: tuple[int, int] | None = None
        message: int | None = None
        if response is not None and response.started and self._attempts:
            first = self._token_at(response.monotonic_us(response.first_token_unix_ns))
            if response.second_token_unix_ns:
                second = self._token_at(response.monotonic_us(response.second_token_unix_ns))
            if response.first_message_unix_ns:
                message = response.monotonic_us(response.first_message_unix_ns)
        return RequestSteps(
            arrival=self._arrival_us,
            tokenize=tuple(self._tokenize),
            slot_wait=self._slot_wait,
            attempts=tuple(attempt.collect() for attempt in self._attempts),
            first_token=first,
            second_token=second,
            first_message=message,
        )

    async def wait_for_report(self, deadline: Deadline) -> None:
        """Waits for the prefill worker's report, if one is missing, for 1 s at most."""
        await wait_for_report(self._missing(), deadline)

    def when_reported(self, call: Callable[[], None]) -> None:
        """Calls `call` once: now, or when the prefill worker has reported, after 1 s at the latest."""
        call_when_reported(self._missing(), call)

    def _missing(self) -> asyncio.Future[TaskOutcome] | None:
        """The outcome of the last attempt that made a token, if it is not there yet."""
        if not self._attempts or self._response is None or not self._response.started:
            return None
        outcome = self._attempts[-1].outcome
        return None if outcome is None or outcome.done() else outcome

    def _token_at(self, time_us: int) -> tuple[int, int]:
        """The arrival of a token, with the attempt that was running."""
        index = len(self._attempts) - 1
        while index > 0 and self._attempts[index].route_start_us > time_us:
            index -= 1
        return time_us, index


def _now_us() -> int:
    return time.monotonic_ns() // 1_000


def _us_or_none(time_ns: int) -> int | None:
    return time_ns // 1_000 if time_ns else None
