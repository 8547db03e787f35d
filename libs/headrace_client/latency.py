"""The parts of a latency as the client sees it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import latency_pb2
from headrace_common.latency.breakdown import break_down, breakdown_to_proto
from headrace_common.latency.calls import Call, with_task
from headrace_common.latency.parts import Part, Sum, sum_from_proto, sum_to_proto
from headrace_common.latency.steps import AttemptSteps, RequestSteps, decode_steps

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


class DirectSteps:
    """A direct attempt as its client records it: the RPCs, and what their servers reported."""

    def __init__(self, begin_us: int, route: Call, route_steps: latency_pb2.RouteSteps) -> None:
        """`begin_us` is when the client began with the request, perhaps with another attempt."""
        self._begin_us = begin_us
        self._route = route
        self._route_steps = route_steps
        self._generate: Call | None = None
        self._remote = False
        self._prefill: Call | None = None
        self._task = latency_pb2.TaskSteps()
        self._times: decode_pb2.AttemptTimes | None = None

    def reserved(self, sent_ns: int, *, remote: bool) -> None:
        """The decode worker has answered the request that was sent at `sent_ns`. `remote`: it waits for KV."""
        self._generate = Call(sent_ns, time.monotonic_ns())
        self._remote = remote

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
        attempt = AttemptSteps(route_start_us, remote=self._remote)
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
        return with_task(attempt, prefill, task)
