"""The steps of an attempt at a request of this worker's own client, by this worker's monotonic clock."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from headrace.prefill.v1 import prefill_pb2
from headrace_common.latency.steps import AttemptSteps, Call, decode_steps, with_task
from headrace_decode.timestamps import RequestTimestamps


class OwnAttemptTimeline:
    """The steps of one attempt, from its admission by the engine on."""

    def __init__(self, times: RequestTimestamps) -> None:
        self._times = times
        self._asked_ns = 0
        self._answered_ns = 0
        self.outcome: asyncio.Task[prefill_pb2.EnqueueResponse] | None = None
        """The prefill through a router."""

    def asked(self, prefill: asyncio.Task[prefill_pb2.EnqueueResponse]) -> None:
        """A router is asked for the prefill."""
        self._asked_ns = time.monotonic_ns()
        self.outcome = prefill
        prefill.add_done_callback(self._answered)

    def _answered(self, prefill: asyncio.Task[prefill_pb2.EnqueueResponse]) -> None:
        self._answered_ns = time.monotonic_ns()

    @property
    def route_start_us(self) -> int:
        """When the engine admitted it."""
        return self._times.start_monotonic_ns // 1_000

    def collect(self) -> AttemptSteps:
        """The steps that are known now."""
        times = self._times.to_proto()
        attempt = AttemptSteps(
            route_start=self.route_start_us,
            start=self.route_start_us,
            remote=self.outcome is not None,
            decode=decode_steps(times, self.route_start_us),
        )
        response = self._response
        if response is None or not response.HasField("steps"):
            return attempt
        known = with_task(attempt, Call(self._asked_ns, self._answered_ns), response.steps)
        if known.queued is None:
            return known
        return replace(known, message=(self._asked_ns // 1_000, known.queued))

    @property
    def _response(self) -> prefill_pb2.EnqueueResponse | None:
        task = self.outcome
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()
