"""The times of a task that its router gets. Pure."""

from __future__ import annotations

from headrace.prefill.v1 import prefill_pb2
from headrace_engine.interface import PrefillOutcome


def task_times(
    outcome: PrefillOutcome | None, received_unix_ns: int, sent_unix_ns: int
) -> prefill_pb2.TaskTimes:
    """The times of a task until `sent_unix_ns`. Without an outcome, only that it was received."""

    def after_us(unix_ns: int) -> int:
        return max(1, (unix_ns - received_unix_ns) // 1_000) if unix_ns else 0

    times = prefill_pb2.TaskTimes(received_unix_ns=received_unix_ns, sent_us=after_us(sent_unix_ns))
    if outcome is not None:
        times.compute_start_us = after_us(outcome.compute_start_unix_ns)
        times.compute_end_us = after_us(outcome.compute_end_unix_ns)
        links = [link for report in outcome.reports for link in report.links]
        if links:
            times.first_write_us = after_us(min(link.submitted_unix_ns for link in links))
            times.last_write_us = after_us(max(link.landed_unix_ns for link in links))
    return times
