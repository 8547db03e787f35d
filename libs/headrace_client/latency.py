"""The parts of a latency as the client sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Final

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import latency_pb2
from headrace_common.latency.breakdown import break_down, breakdown_to_proto
from headrace_common.latency.parts import Part, Sum, sum_from_proto, sum_to_proto
from headrace_common.latency.steps import (
    AttemptSteps,
    PrefillSteps,
    RequestSteps,
    decode_steps,
)

# A client without an earlier attempt asks the router sooner.
_EARLIER_US: Final = 5_000


def complete_latency(
    latency: latency_pb2.LatencyBreakdown, measured_us: int, retry_us: int
) -> None:
    """Extends the router's first sum to the time that the client measured.

    `retry_us` of it passed before the call that succeeded. The rest that the router has not seen is the network's.
    """
    known = sum_from_proto(latency.first_token)
    parts = dict(known.parts_us)
    missing_us = max(0, measured_us - known.total_us)
    retry_us = min(missing_us, retry_us)
    for part, more_us in ((Part.RETRY, retry_us), (Part.NETWORK, missing_us - retry_us)):
        if more_us:
            parts[part] = parts.get(part, 0) + more_us
    latency.first_token.CopyFrom(sum_to_proto(Sum(known.total_us + missing_us, parts)))


@dataclass(frozen=True, slots=True)
class Call:
    """When an RPC was sent and answered, in nanoseconds of the monotonic clock."""

    sent_ns: int
    answered_ns: int

    @property
    def sent_us(self) -> int:
        """As `sent_ns`."""
        return self.sent_ns // 1_000

    @property
    def answered_us(self) -> int:
        """As `answered_ns`."""
        return self.answered_ns // 1_000

    def delay_us(self, server_us: int) -> int:
        """Half of the time that was not the server's: the bound on the error of `receipt_us`."""
        return max(0, self.answered_us - self.sent_us - server_us) // 2

    def receipt_us(self, server_us: int) -> int:
        """When the server received it, if both messages took as long and the server took `server_us`."""
        return self.sent_us + self.delay_us(server_us)


class DirectSteps:
    """A direct attempt as its client records it: the RPCs, and what their servers reported."""

    def __init__(self, begin_us: int, route: Call, route_steps: latency_pb2.RouteSteps) -> None:
        """`begin_us` is when the client began with the request, perhaps with another attempt."""
        self._begin_us = begin_us
        self._route = route
        self._route_steps = route_steps
        self._generate: Call | None = None
        self._prefill: Call | None = None
        self._task = latency_pb2.TaskSteps()
        self._times: decode_pb2.AttemptTimes | None = None

    def reserved(self, sent_ns: int) -> None:
        """The decode worker has answered the request that was sent at `sent_ns`."""
        self._generate = Call(sent_ns, time.monotonic_ns())

    def prefilled(self, sent_ns: int, steps: latency_pb2.TaskSteps) -> None:
        """The router has answered the Prefill call that was sent at `sent_ns`."""
        self._prefill, self._task = Call(sent_ns, time.monotonic_ns()), steps

    def made(self, times: decode_pb2.AttemptTimes) -> None:
        """The decode worker has made the first token."""
        self._times = times

    def latency(self, first_us: int) -> latency_pb2.LatencyBreakdown:
        """The sum of a request with its first token at `first_us`."""
        route, steps = self._route, self._route_steps
        received_us = route.receipt_us(steps.sent_us)
        messages = [
            (route.sent_us, received_us),
            (received_us + steps.sent_us, route.answered_us),
        ]
        attempt = self._attempt(received_us + steps.route_start_us)
        if self._prefill is not None and attempt.queued is not None:
            messages.append((self._prefill.sent_us, attempt.queued))
        attempts: tuple[AttemptSteps, ...] = (attempt,)
        if route.sent_us - self._begin_us > _EARLIER_US:
            attempts = (AttemptSteps(self._begin_us), attempt)
        request = RequestSteps(
            self._begin_us,
            tokenize=(
                (received_us + steps.tokenize_start_us, received_us + steps.tokenize_end_us),
            ),
            messages=tuple(messages),
            attempts=attempts,
            first_token=(first_us, len(attempts) - 1),
        )
        return breakdown_to_proto(break_down(request, first_us))

    def _attempt(self, route_start_us: int) -> AttemptSteps:
        attempt = AttemptSteps(route_start_us)
        generate, prefill, times, task = self._generate, self._prefill, self._times, self._task
        if generate is not None:
            attempt = replace(attempt, start=generate.sent_us, reserved=generate.answered_us)
            if times is not None:
                worker_us = times.reserved_us
                attempt = replace(
                    attempt,
                    decode=decode_steps(times, generate.receipt_us(worker_us)),
                    error_us=generate.delay_us(worker_us),
                )
        if prefill is None:
            return attempt
        return replace(
            _with_task(attempt, prefill.receipt_us(task.sent_us), task),
            remote=True,
            error_us=attempt.error_us + prefill.delay_us(task.sent_us) + task.clock_error_us,
        )


def _with_task(
    attempt: AttemptSteps, received_us: int, task: latency_pb2.TaskSteps
) -> AttemptSteps:
    def at(after_us: int) -> int | None:
        return received_us + after_us if after_us else None

    prefill = PrefillSteps(
        received_us + task.received_us,
        compute_start=at(task.compute_start_us),
        compute_end=at(task.compute_end_us),
        first_write=at(task.first_write_us),
        last_write=at(task.last_write_us),
    )
    return replace(
        attempt,
        queued=at(task.queued_us),
        pulled=at(task.pulled_us),
        prefill=prefill if task.received_us else None,
    )
