"""The steps of one request of this worker's own client. All times are by this worker's monotonic clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.prefill.v1 import prefill_pb2
from headrace_common.deadlines import Deadline
from headrace_common.latency.breakdown import Breakdown, break_down
from headrace_common.latency.calls import Call, with_task
from headrace_common.latency.report import call_when_reported, wait_for_report
from headrace_common.latency.steps import AttemptSteps, RequestSteps, decode_steps
from headrace_decode.timestamps import RequestTimestamps
from headrace_frontend.request.response_stream import ResponseStream


class OwnAttemptTimeline:
    """The steps of one attempt, from its admission by the engine on."""

    def __init__(self, times: RequestTimestamps) -> None:
        self._times = times
        self._asked_ns = 0
        self._answered_ns = 0
        self.prefill: asyncio.Task[prefill_pb2.EnqueueResponse] | None = None
        """The prefill through a router."""

    def asked(self, prefill: asyncio.Task[prefill_pb2.EnqueueResponse]) -> None:
        """A router is asked for the prefill."""
        self._asked_ns = time.monotonic_ns()
        self.prefill = prefill
        prefill.add_done_callback(self._answered)

    def _answered(self, prefill: asyncio.Task[prefill_pb2.EnqueueResponse]) -> None:
        self._answered_ns = time.monotonic_ns()

    @property
    def start_us(self) -> int:
        """When the engine admitted it."""
        return self._times.start_monotonic_ns // 1_000

    def collect(self) -> AttemptSteps:
        """The steps that are known now."""
        times = self._times.to_proto()
        attempt = AttemptSteps(
            route_start=self.start_us,
            start=self.start_us,
            remote=self.prefill is not None,
            decode=decode_steps(times, self.start_us),
        )
        response = self._response
        if response is None or not response.HasField("steps"):
            return attempt
        return with_task(attempt, Call(self._asked_ns, self._answered_ns), response.steps)

    def message_us(self, attempt: AttemptSteps) -> tuple[int, int] | None:
        """The way of the prompt to the router's queue."""
        return None if attempt.queued is None else (self._asked_ns // 1_000, attempt.queued)

    @property
    def _response(self) -> prefill_pb2.EnqueueResponse | None:
        task = self.prefill
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()


class OwnTimeline:
    """The steps of one request."""

    def __init__(self, arrival_ns: int) -> None:
        self._arrival_us = arrival_ns // 1_000
        self._tokenize: tuple[tuple[int, int], ...] = ()
        self._room_wait_start_us = 0
        self._attempts: list[OwnAttemptTimeline] = []
        self.response: ResponseStream | None = None
        """The response, once the request was admitted and prepared."""

    def tokenized(self, interval_ns: tuple[int, int]) -> None:
        """The prompt became tokens within this interval. The wait for room begins."""
        start_ns, end_ns = interval_ns
        self._tokenize = ((start_ns // 1_000, end_ns // 1_000),)
        self._room_wait_start_us = _now_us()

    def attempt_admitted(self, times: RequestTimestamps) -> OwnAttemptTimeline:
        """The engine has room for an attempt."""
        attempt = OwnAttemptTimeline(times)
        self._attempts.append(attempt)
        return attempt

    def break_down(self) -> Breakdown:
        """The sum, from the steps that are known now. Without a first token, it lasts until now."""
        attempts = tuple(attempt.collect() for attempt in self._attempts)
        now_us = _now_us()
        first: tuple[int, int] | None = None
        message: int | None = None
        response = self.response
        if response is not None and response.started and attempts:
            at_us = response.monotonic_us(response.first_token_unix_ns)
            # An attempt that fails after its first token has no successor.
            first = (at_us, len(attempts) - 1)
            if response.first_message_unix_ns:
                message = response.monotonic_us(response.first_message_unix_ns)
        messages = (
            one.message_us(steps) for one, steps in zip(self._attempts, attempts, strict=True)
        )
        steps = RequestSteps(
            arrival=self._arrival_us,
            tokenize=self._tokenize,
            slot_wait=self._room_wait(now_us),
            messages=tuple(filter(None, messages)),
            attempts=attempts,
            first_token=first,
            first_message=message,
        )
        return break_down(steps, now_us)

    def _room_wait(self, now_us: int) -> tuple[int, int] | None:
        if not self._room_wait_start_us:
            return None
        end_us = self._attempts[0].start_us if self._attempts else now_us
        return self._room_wait_start_us, end_us

    async def wait_for_report(self, deadline: Deadline) -> None:
        """Waits for the router's report of the prefill, if it is missing, for 1 s at most."""
        await wait_for_report(self._missing(), deadline)

    def when_reported(self, call: Callable[[], None]) -> None:
        """Calls `call` once: now, or when the prefill was reported, after 1 s at the latest."""
        call_when_reported(self._missing(), call)

    def _missing(self) -> asyncio.Task[prefill_pb2.EnqueueResponse] | None:
        prefill = self._attempts[-1].prefill if self._attempts else None
        return None if prefill is None or prefill.done() else prefill


def _now_us() -> int:
    return time.monotonic_ns() // 1_000
