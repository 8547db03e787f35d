"""The steps of a request, from which its sums are made. Times are microseconds of the router's clock.

Those of workers are moved within the error of their clocks, so that nothing arrives before it was sent. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import first_token_pb2, latency_pb2
from headrace.prefill.v1 import prefill_pb2


class FirstTokenBy(StrEnum):
    """How the first token is made: by the decode worker, by the prefill worker, or by decode from prefill's state."""

    DECODE = "decode"
    PREFILL = "prefill"
    HIDDEN = "hidden"


# A member of an Enum is found by a Python function.
BY_DECODE, BY_PREFILL, BY_HIDDEN = FirstTokenBy
MAKERS: Final = {
    first_token_pb2.FIRST_TOKEN_POLICY_DECODE: BY_DECODE,
    first_token_pb2.FIRST_TOKEN_POLICY_PREFILL: BY_PREFILL,
    first_token_pb2.FIRST_TOKEN_POLICY_HIDDEN: BY_HIDDEN,
}


class DecodeSteps(NamedTuple):
    """An attempt on its decode worker. None for a step that has not happened or is not known."""

    received: int
    reserved: int | None = None
    kv_arrived: int | None = None
    hidden_state_arrived: int | None = None
    sampled: int | None = None
    token_received: int | None = None
    step_start: int | None = None
    first_token: int | None = None


class PrefillSteps(NamedTuple):
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


@dataclass(slots=True)
class AttemptSteps:
    """One attempt. `start` is its request to the decode worker. `error_us` bounds the error of the workers' times."""

    route_start: int
    start: int | None = None
    reserved: int | None = None
    queued: int | None = None
    pulled: int | None = None
    remote: bool = False
    first_token_by: FirstTokenBy = BY_DECODE
    decode: DecodeSteps | None = None
    prefill: PrefillSteps | None = None
    parts_start: int | None = None
    """When other prefill workers began with the tokens before those of this one."""
    message: tuple[int, int] | None = None
    """The way of the prompt to another process's queue."""
    error_us: int = 0
    route_end: int | None = None

    def move(self, prefill_us: int, decode_us: int) -> None:
        """Moves all steps of each worker by so many microseconds."""
        if self.prefill is not None and prefill_us:
            self.prefill = PrefillSteps._make(_moved(self.prefill, prefill_us))
        if self.decode is not None and decode_us:
            self.decode = DecodeSteps._make(_moved(self.decode, decode_us))

    def add_task(self, sent_us: int, answered_us: int, task: latency_pb2.TaskSteps) -> None:
        """Adds the prefill.

        `task` answered an RPC that was sent and answered at these times, by the clock of this attempt's times.
        """
        # Both messages took as long, as far as is known. Their time bounds the error.
        delay_us = max(0, answered_us - sent_us - task.sent_us) // 2
        received_us = sent_us + delay_us
        self.remote = True
        self.queued, self.pulled = _at(received_us, (task.queued_us, task.pulled_us))
        self.error_us = delay_us + task.clock_error_us
        if self.queued is not None:
            self.message = (sent_us, self.queued)
        if task.received_us:
            self.prefill = prefill_steps(task, received_us)._replace(
                received=received_us + task.received_us, sent=None
            )


@dataclass(slots=True)
class RequestSteps:
    """One request. `first_message` is when the first token left for the client.

    The wait for a slot of the decode workers lasts from `slot_start`, until now without `slot_end`. `first_token` and
    `second_token` are the arrivals at the router, each with the index of its attempt.
    """

    arrival: int
    fetch: tuple[int, int] | None = None
    """That of images, before the tokenizer."""
    tokenize: tuple[int, int] | None = None
    slot_start: int | None = None
    slot_end: int | None = None
    attempts: Sequence[AttemptSteps] = ()
    first_token: tuple[int, int] | None = None
    second_token: tuple[int, int] | None = None
    first_message: int | None = None


def decode_steps(times: decode_pb2.AttemptTimes, received_us: int) -> DecodeSteps:
    """The steps that a decode worker reported. `received_us` is its receipt of the request, by the router's clock."""
    first_us = (times.reserved_us, times.kv_arrived_us, times.hidden_state_arrived_us)
    last_us = (times.sampled_us, times.token_received_us, times.step_start_us, times.first_token_us)
    return DecodeSteps._make((received_us, *_at(received_us, first_us + last_us)))


def prefill_steps(
    times: prefill_pb2.TaskTimes | latency_pb2.TaskSteps, received_us: int
) -> PrefillSteps:
    """The steps that a prefill worker reported. `received_us` is its receipt of the task, by the router's clock."""
    computed_us = (times.compute_start_us, times.compute_end_us)
    sent_us = (times.first_write_us, times.last_write_us, times.sent_us)
    return PrefillSteps._make((received_us, *_at(received_us, computed_us + sent_us)))


def _moved(steps: Sequence[int | None], by_us: int) -> list[int | None]:
    return [None if one is None else one + by_us for one in steps]


def _at(start_us: int, after_us: Sequence[int]) -> list[int | None]:
    """The times so long after the start. None for 0, which means that a step has not happened."""
    return [start_us + one if one else None for one in after_us]


def alignment_of(
    attempt: AttemptSteps, first_us: int | None, second_us: int | None
) -> tuple[int, int]:
    """Microseconds to add to all steps of the prefill worker, and to all of the decode worker: the least that helps.

    `first_us` and `second_us` are the router's receipts of the first tokens, if this attempt made them. Where the last
    write landed after decode had the KV cache, both workers move, each in proportion to the room that it has.
    """
    prefill, decode, error_us = attempt.prefill, attempt.decode, attempt.error_us
    if not error_us:
        return 0, 0
    by_prefill = attempt.first_token_by == BY_PREFILL
    lowest_us = prefill_us = decode_us = highest_us = 0
    if prefill is not None:
        made = prefill.sent if by_prefill else None
        lowest_us, prefill_us, _ = _moves(
            error_us, [(attempt.pulled, prefill.received)], [(made, first_us)]
        )
    if decode is not None:
        made = None if by_prefill else decode.sampled or decode.first_token
        sent = [(attempt.start, decode.received), (first_us, decode.token_received)]
        received = [(made, first_us), (decode.first_token, second_us)]
        _, decode_us, highest_us = _moves(error_us, sent, received)
    if prefill is None or decode is None or decode.kv_arrived is None:
        return prefill_us, decode_us
    landed = prefill.last_write or prefill.compute_end or prefill.received
    prefill_room_us, decode_room_us = prefill_us - lowest_us, highest_us - decode_us
    room_us = prefill_room_us + decode_room_us
    early_us = max(0, min(room_us, landed + prefill_us - decode.kv_arrived - decode_us))
    back_us = early_us * prefill_room_us // max(1, room_us)
    return prefill_us - back_us, decode_us + early_us - back_us


def _moves(
    error_us: int,
    sent_to: Iterable[tuple[int | None, int | None]],
    received_from: Iterable[tuple[int | None, int | None]],
) -> tuple[int, int, int]:
    """The lowest, the least and the highest move of a worker. Pairs are a message's start and its end."""
    low = [start - end for start, end in sent_to if start is not None and end is not None]
    high = [end - start for start, end in received_from if start is not None and end is not None]
    # Without an order that meets all, what the worker receives counts.
    lowest = min(error_us, max(-error_us, *low, -error_us))
    highest = max(lowest, min(error_us, *high, error_us))
    return lowest, min(max(0, lowest), highest), highest
