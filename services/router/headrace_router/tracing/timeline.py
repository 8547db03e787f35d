"""The steps of one request on the router's clock, with those that its workers report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from headrace.inference.v1 import first_token_pb2
from headrace_common.latency.breakdown import Breakdown, break_down
from headrace_common.latency.steps import (
    AttemptSteps,
    FirstTokenBy,
    RequestSteps,
    decode_steps,
    prefill_steps,
)
from headrace_frontend.request.response_stream import ResponseStream
from headrace_kv.layout.layout import WorkerRef
from headrace_router.decode_link.answer import LinkedAnswer
from headrace_router.prefill_queue.task import QueuedTask, TaskOutcome
from headrace_router.tracing.worker_clocks import ClockDifference, WorkerClocks, difference_now

# A prefill worker reports at about the time of the first token.
_REPORT_WAIT_S: Final = 1.0
_MAKERS: Final = {
    first_token_pb2.FIRST_TOKEN_POLICY_PREFILL: FirstTokenBy.PREFILL,
    first_token_pb2.FIRST_TOKEN_POLICY_LOGITS: FirstTokenBy.LOGITS,
}


class AttemptTimeline:
    """The steps of one attempt, from the choice of its workers on."""

    def __init__(self, clocks: WorkerClocks) -> None:
        self.steps = AttemptSteps(_now_us())
        self.differences: dict[str, ClockDifference] = {}
        """Of the workers that have reported, by worker id."""
        self._clocks = clocks
        self._decode_worker_id = ""
        self._answer: LinkedAnswer | None = None
        self._queued: QueuedTask | None = None
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
        self.steps.start = self._start_ns // 1_000
        self.steps.remote = remote
        self.steps.first_token_by = _MAKERS.get(first_token, FirstTokenBy.DECODE)

    def queued(self, task: QueuedTask) -> None:
        """The prompt is in the prefill queue."""
        self._queued = task

    def collect(self) -> AttemptSteps:
        """The steps that are known now."""
        if self._answer is not None and self._answer.reserved_ns:
            self.steps.reserved = self._answer.reserved_ns // 1_000
            self._collect_decode(self._answer)
        if self._queued is not None:
            self._collect_queue(self._queued)
        errors_ns = (one.error_ns for one in self.differences.values())
        self.steps.error_us = max(errors_ns, default=0) // 1_000
        return self.steps

    def _collect_decode(self, answer: LinkedAnswer) -> None:
        times = answer.times
        if times is None:
            return
        clock = self._clocks.clock(self._decode_worker_id)
        if not self._reserved_exchange:
            self._reserved_exchange = True
            replied_ns = times.received_unix_ns + 1_000 * times.reserved_us
            clock.add_exchange(
                *(self._start_ns, times.received_unix_ns, replied_ns, answer.reserved_ns)
            )
        self.differences[self._decode_worker_id] = difference_now(clock)
        self.steps.decode = decode_steps(times, clock.ours_ns(times.received_unix_ns) // 1_000)

    def _collect_queue(self, queued: QueuedTask) -> None:
        self.steps.queued = queued.queued_ns // 1_000
        if queued.worker is None or not queued.pulled_ns:
            return
        self.steps.pulled = queued.pulled_ns // 1_000
        done = queued.outcome.result().done if queued.outcome.done() else None
        first = queued.first_token.result() if queued.first_token.done() else None
        report = done if done is not None and done.HasField("times") else first
        if report is None or not report.HasField("times"):
            return
        times, worker_id = report.times, queued.worker.worker_id
        clock = self._clocks.clock(worker_id)
        if not self._task_exchange and report is done:
            self._task_exchange = True
            replied_ns = times.received_unix_ns + 1_000 * times.sent_us
            clock.add_exchange(
                *(queued.pulled_ns, times.received_unix_ns, replied_ns, queued.ended_ns)
            )
        if not clock.known:
            return
        self.differences[worker_id] = difference_now(clock)
        received_us = clock.ours_ns(times.received_unix_ns) // 1_000
        steps = prefill_steps(times, received_us)
        if first is not None:
            steps = replace(steps, sent=received_us + first.times.sent_us)
        self.steps.prefill = steps


class RequestTimeline:
    """The steps of one request. One event loop owns it."""

    def __init__(self, clocks: WorkerClocks | None = None, arrival_ns: int = 0) -> None:
        """`arrival_ns` is by the monotonic clock; 0 means now."""
        self._clocks = clocks or WorkerClocks()
        self._steps = RequestSteps((arrival_ns or time.monotonic_ns()) // 1_000)
        self._attempts: list[AttemptTimeline] = []
        self._response: ResponseStream | None = None

    @property
    def response(self) -> ResponseStream | None:
        """The response, once the request was admitted and prepared."""
        return self._response

    def tokenized(self, interval_ns: tuple[int, int]) -> None:
        """The prompt became tokens within this interval of the monotonic clock."""
        start_ns, end_ns = interval_ns
        self._steps.tokenize.append((start_ns // 1_000, end_ns // 1_000))

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

    def break_down(self) -> Breakdown:
        """The sums, from the steps that are known now. Without a first token, the first one lasts until now."""
        steps, response = self._steps, self._response
        steps.attempts = [attempt.collect() for attempt in self._attempts]
        if response is not None and response.started and steps.attempts:
            first_us = response.monotonic_us(response.first_token_unix_ns)
            steps.first_token = first_us, self._attempt_at(first_us)
            if response.second_token_unix_ns:
                second_us = response.monotonic_us(response.second_token_unix_ns)
                steps.second_token = second_us, self._attempt_at(second_us)
            if response.first_message_unix_ns:
                steps.first_message = response.monotonic_us(response.first_message_unix_ns)
        return break_down(steps, _now_us())

    async def wait_report(self, timeout_s: float) -> None:
        """Waits for the prefill worker's report, if one is missing."""
        missing = self._missing()
        if missing is not None:
            await asyncio.wait({missing}, timeout=timeout_s)

    def when_reported(self, call: Callable[[], None]) -> None:
        """Calls `call` once: now, or when the prefill worker has reported, after 1 s at the latest."""
        missing = self._missing()
        if missing is None:
            call()
            return
        called = False

        def once(_: object = None) -> None:
            nonlocal called
            if not called:
                called = True
                timer.cancel()
                call()

        timer = asyncio.get_running_loop().call_later(_REPORT_WAIT_S, once)
        missing.add_done_callback(once)

    def _missing(self) -> asyncio.Future[TaskOutcome] | None:
        """The outcome of the last attempt that made a token, if it is not there yet."""
        if not self._attempts or self._response is None or not self._response.started:
            return None
        outcome = self._attempts[-1].outcome
        return None if outcome is None or outcome.done() else outcome

    def _attempt_at(self, time_us: int) -> int:
        """The attempt that was running."""
        index = len(self._attempts) - 1
        while index > 0 and self._attempts[index].steps.route_start > time_us:
            index -= 1
        return index


def _now_us() -> int:
    return time.monotonic_ns() // 1_000
