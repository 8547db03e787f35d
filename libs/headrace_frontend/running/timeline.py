"""The steps of one request on this process's monotonic clock, with those that workers report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from headrace_common.deadlines import Deadline
from headrace_common.latency.breakdown import Breakdown, break_down
from headrace_common.latency.clocks import ClockDifference
from headrace_common.latency.steps import AttemptSteps, RequestSteps
from headrace_frontend.request.response_stream import ResponseStream

REPORT_WAIT_S: Final = 1.0
"""Longest wait: a report comes at about the time of the first token."""


class TimedAttempt(Protocol):
    """The steps of one attempt."""

    @property
    def route_start_us(self) -> int:
        """When the attempt began, in microseconds of the monotonic clock."""
        ...

    @property
    def outcome(self) -> asyncio.Future[Any] | None:
        """The outcome of its prefill, which has the prefill worker's report. None without a remote prefill."""
        ...

    @property
    def facts(self) -> Any:
        """What its spans show beside the steps."""
        ...

    @property
    def differences(self) -> Mapping[str, ClockDifference]:
        """How far the clocks of the workers that have reported are ahead, by worker id."""
        ...

    def collect(self) -> AttemptSteps:
        """The steps that are known now."""
        ...


class RequestTimeline:
    """The steps of one request. One event loop owns it."""

    def __init__(self, arrival_ns: int = 0, arrival_unix_ns: int = 0) -> None:
        """`arrival_ns` is by the monotonic clock; 0 means now. `arrival_unix_ns` is the same moment."""
        self.arrival_ns = arrival_ns or time.monotonic_ns()
        self.arrival_unix_ns = arrival_unix_ns or time.time_ns()
        self.attempts: list[TimedAttempt] = []
        """Oldest first."""
        self.response: ResponseStream | None = None
        """The response, once the request was admitted and prepared."""
        self._tokenize: list[tuple[int, int]] = []
        self._slot_start_us = 0
        self._slot_end_us = 0

    def tokenized(self, interval_ns: tuple[int, int]) -> None:
        """The prompt became tokens within this interval of the monotonic clock."""
        start_ns, end_ns = interval_ns
        self._tokenize.append((start_ns // 1_000, end_ns // 1_000))

    def slot_wanted(self) -> None:
        """The wait for a slot on a decode worker begins, or goes on for another reason."""
        self._slot_start_us = self._slot_start_us or now_us()
        self._slot_end_us = 0

    def slot_acquired(self) -> None:
        """The wait for a slot has ended."""
        self._slot_end_us = now_us()

    def break_down(self) -> Breakdown:
        """The sums, from the steps that are known now. Without a first token, the first one lasts until now."""
        return break_down(self.steps(), now_us())

    def steps(self) -> RequestSteps:
        """The steps that are known now."""
        response = self.response
        first: tuple[int, int] | None = None
        second: tuple[int, int] | None = None
        message: int | None = None
        if response is not None and response.started and self.attempts:
            times = response.times
            first = self._token_at(times.monotonic_us(times.first_token_unix_ns))
            if times.second_token_unix_ns:
                second = self._token_at(times.monotonic_us(times.second_token_unix_ns))
            if times.first_message_unix_ns:
                message = times.monotonic_us(times.first_message_unix_ns)
        slot_start_us = self._slot_start_us
        return RequestSteps(
            arrival=self.arrival_ns // 1_000,
            tokenize=tuple(self._tokenize),
            slot_wait=(slot_start_us, self._slot_end_us or now_us()) if slot_start_us else None,
            attempts=tuple(attempt.collect() for attempt in self.attempts),
            first_token=first,
            second_token=second,
            first_message=message,
        )

    def responding(self, response: ResponseStream) -> None:
        """`response` gets the tokens."""
        self.response = response

    async def wait_for_report(self, deadline: Deadline) -> None:
        """Waits for the prefill worker's report, if one is missing, for 1 s at most."""
        await wait_for_report(self._missing(), deadline)

    def when_reported(self, call: Callable[[], None]) -> None:
        """Calls `call` once: now, or when the prefill worker has reported, after 1 s at the latest."""
        call_when_reported(self._missing(), call)

    def _missing(self) -> asyncio.Future[Any] | None:
        """The outcome of the last attempt that made a token, if it is not there yet."""
        if not self.attempts or self.response is None or not self.response.started:
            return None
        outcome = self.attempts[-1].outcome
        return None if outcome is None or outcome.done() else outcome

    def _token_at(self, time_us: int) -> tuple[int, int]:
        """The arrival of a token, with the attempt that was running."""
        index = len(self.attempts) - 1
        while index > 0 and self.attempts[index].route_start_us > time_us:
            index -= 1
        return time_us, index


def now_us() -> int:
    """Microseconds of the monotonic clock."""
    return time.monotonic_ns() // 1_000


async def wait_for_report(report: asyncio.Future[Any] | None, deadline: Deadline) -> None:
    """Returns once the report is there, after REPORT_WAIT_S or half of the time to the deadline at the latest.

    The other half is for the answer that the report is a part of.
    """
    if report is not None:
        await asyncio.wait({report}, timeout=min(REPORT_WAIT_S, deadline.remaining_s() / 2))


def call_when_reported(report: asyncio.Future[Any] | None, call: Callable[[], None]) -> None:
    """Calls `call` once: now if no report is missing, else when it is there, after REPORT_WAIT_S at the latest."""
    if report is None:
        call()
        return
    waiting = [call]

    def once(_: object = None) -> None:
        timer.cancel()
        if waiting:
            waiting.pop()()

    timer = asyncio.get_running_loop().call_later(REPORT_WAIT_S, once)
    report.add_done_callback(once)
