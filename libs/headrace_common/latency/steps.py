"""The steps of a request, from which its sums are made. Times are microseconds of the router's clock. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import latency_pb2
from headrace.prefill.v1 import prefill_pb2


class FirstTokenBy(StrEnum):
    """How the first token is made: by the decode worker, by the prefill worker, or by decode from prefill's state."""

    DECODE = "decode"
    PREFILL = "prefill"
    HIDDEN = "hidden"


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """An attempt on its decode worker. None for a step that has not happened or is not known."""

    received: int
    reserved: int | None = None
    kv_arrived: int | None = None
    hidden_state_arrived: int | None = None
    sampled: int | None = None
    token_received: int | None = None
    step_start: int | None = None
    first_token: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillSteps:
    """A task on its prefill worker. None for a step that has not happened or is not known."""

    received: int
    compute_start: int | None = None
    compute_end: int | None = None
    first_write: int | None = None
    last_write: int | None = None
    sent: int | None = None

    @property
    def hidden_us(self) -> int:
        """Time of the transfer beside the computation."""
        start, end = self.first_write, self.last_write
        if start is None or end is None or self.compute_end is None:
            return 0
        return max(0, min(end, self.compute_end) - max(start, self.compute_start or start))


@dataclass(frozen=True, slots=True)
class AttemptSteps:
    """One attempt. `start` is its request to the decode worker. `error_us` bounds the error of the workers' times."""

    route_start: int
    start: int | None = None
    reserved: int | None = None
    queued: int | None = None
    pulled: int | None = None
    remote: bool = False
    first_token_by: FirstTokenBy = FirstTokenBy.DECODE
    decode: DecodeSteps | None = None
    prefill: PrefillSteps | None = None
    message: tuple[int, int] | None = None
    """The way of the prompt to another process's queue."""
    error_us: int = 0


@dataclass(frozen=True, slots=True)
class RequestSteps:
    """One request. `tokenize` has an interval for each try.

    `slot_wait` is the wait for a slot of the decode workers. `first_token` and `second_token` are the arrivals at the
    router, each with the index of its attempt. `first_message` is when the first token left for the client.
    """

    arrival: int
    tokenize: tuple[tuple[int, int], ...] = ()
    slot_wait: tuple[int, int] | None = None
    attempts: tuple[AttemptSteps, ...] = ()
    first_token: tuple[int, int] | None = None
    second_token: tuple[int, int] | None = None
    first_message: int | None = None


def decode_steps(times: decode_pb2.AttemptTimes, received_us: int) -> DecodeSteps:
    """The steps that a decode worker reported. `received_us` is its receipt of the request, by the router's clock."""

    def at(after_us: int) -> int | None:
        return received_us + after_us if after_us else None

    return DecodeSteps(
        received_us,
        reserved=at(times.reserved_us),
        kv_arrived=at(times.kv_arrived_us),
        hidden_state_arrived=at(times.hidden_state_arrived_us),
        sampled=at(times.sampled_us),
        token_received=at(times.token_received_us),
        step_start=at(times.step_start_us),
        first_token=at(times.first_token_us),
    )


def prefill_steps(
    times: prefill_pb2.TaskTimes | latency_pb2.TaskSteps, received_us: int
) -> PrefillSteps:
    """The steps that a prefill worker reported. `received_us` is its receipt of the task, by the router's clock."""

    def at(after_us: int) -> int | None:
        return received_us + after_us if after_us else None

    return PrefillSteps(
        received_us,
        compute_start=at(times.compute_start_us),
        compute_end=at(times.compute_end_us),
        first_write=at(times.first_write_us),
        last_write=at(times.last_write_us),
        sent=at(times.sent_us),
    )


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

    prefill = prefill_steps(task, received_us)
    prefill = replace(prefill, received=received_us + task.received_us, sent=None)
    return replace(
        attempt,
        remote=True,
        queued=at(task.queued_us),
        pulled=at(task.pulled_us),
        prefill=prefill if task.received_us else None,
        error_us=attempt.error_us + call.delay_us(task.sent_us) + task.clock_error_us,
    )
