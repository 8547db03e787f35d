"""The steps of a direct request on the router, for its client."""

from __future__ import annotations

import time

from headrace.inference.v1 import latency_pb2
from headrace_common.latency.steps import AttemptSteps


def route_steps(
    arrival_ns: int, tokenized_ns: tuple[int, int], route_ns: int
) -> latency_pb2.RouteSteps:
    """The steps of a Route call until now. Times are by the monotonic clock."""

    def after_us(time_ns: int) -> int:
        return max(1, (time_ns - arrival_ns) // 1_000)

    start_ns, end_ns = tokenized_ns
    return latency_pb2.RouteSteps(
        tokenize_start_us=after_us(start_ns),
        tokenize_end_us=after_us(end_ns),
        route_start_us=after_us(route_ns),
        sent_us=after_us(time.monotonic_ns()),
    )


def task_steps(attempt: AttemptSteps, arrival_ns: int) -> latency_pb2.TaskSteps:
    """The steps of a Prefill call until now."""
    arrival_us = arrival_ns // 1_000

    def after_us(time_us: int | None) -> int:
        return 0 if time_us is None else max(1, time_us - arrival_us)

    prefill = attempt.prefill
    steps = latency_pb2.TaskSteps(
        queued_us=after_us(attempt.queued),
        pulled_us=after_us(attempt.pulled),
        sent_us=after_us(time.monotonic_ns() // 1_000),
        clock_error_us=attempt.error_us,
    )
    if prefill is not None:
        steps.received_us = after_us(prefill.received)
        steps.compute_start_us = after_us(prefill.compute_start)
        steps.compute_end_us = after_us(prefill.compute_end)
        steps.first_write_us = after_us(prefill.first_write)
        steps.last_write_us = after_us(prefill.last_write)
    return steps
