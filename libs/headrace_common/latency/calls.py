"""RPCs as their caller sees them, and the steps that their servers report. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.inference.v1 import latency_pb2
from headrace_common.latency.steps import AttemptSteps, PrefillSteps


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


def with_task(attempt: AttemptSteps, call: Call, task: latency_pb2.TaskSteps) -> AttemptSteps:
    """Adds the prefill of an attempt. `call` is the RPC that `task` answered, by the clock of the attempt's times."""
    received_us = call.receipt_us(task.sent_us)

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
        remote=True,
        queued=at(task.queued_us),
        pulled=at(task.pulled_us),
        prefill=prefill if task.received_us else None,
        error_us=attempt.error_us + call.delay_us(task.sent_us) + task.clock_error_us,
    )
