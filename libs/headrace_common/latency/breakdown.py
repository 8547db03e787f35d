"""The sums of a request: its times to the first tokens as parts. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headrace.inference.v1 import latency_pb2
from headrace_common.latency.parts import (
    Claim,
    Sum,
    TimePart,
    divide,
    sum_from_proto,
    sum_to_proto,
)
from headrace_common.latency.steps import AttemptSteps, DecodeSteps, FirstTokenBy, RequestSteps


class Owner(StrEnum):
    """The sum that contains the exposed transfer. The empty text stands for none."""

    NONE = ""
    FIRST_TOKEN = "first_token"
    SECOND_TOKEN = "second_token"


_OWNERS = {
    Owner.NONE: latency_pb2.TRANSFER_OWNER_UNSPECIFIED,
    Owner.FIRST_TOKEN: latency_pb2.TRANSFER_OWNER_FIRST_TOKEN,
    Owner.SECOND_TOKEN: latency_pb2.TRANSFER_OWNER_SECOND_TOKEN,
}


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The sums of one request. Without a first token, `first` lasts to the end of the request."""

    first: Sum
    second: Sum | None = None
    owner: Owner = Owner.NONE
    hidden_us: int = 0
    clock_error_us: int = 0

    @property
    def exposed_us(self) -> int:
        """The exposed transfer in the owner's sum."""
        owner = self.second if self.owner == Owner.SECOND_TOKEN else self.first
        if owner is None or self.owner == Owner.NONE:
            return 0
        return owner[TimePart.TRANSFER_EXPOSED]


def break_down(steps: RequestSteps, end_us: int) -> Breakdown:
    """The sums of a request that has ended at `end_us`, or that has its first tokens."""
    if steps.first_token is None:
        return Breakdown(divide(steps.arrival, end_us, _claims_of_failure(steps, end_us)))
    at, index = steps.first_token
    attempt = steps.attempts[index] if index < len(steps.attempts) else None
    sent = max(at, steps.first_message or at)
    first = divide(steps.arrival, sent, _first_token_claims(steps, attempt, at, sent))
    if attempt is None:
        return Breakdown(first)
    second: Sum | None = None
    later = attempt
    by_decode = attempt.first_token_by == FirstTokenBy.DECODE
    if steps.second_token is not None and not by_decode:
        second_at, later_index = steps.second_token
        later = steps.attempts[later_index]
        second = divide(at, second_at, _second_token_claims(attempt, later, at, second_at))
    transferred = later.decode is not None and later.decode.kv_arrived is not None
    owner = Owner.FIRST_TOKEN if by_decode else Owner.SECOND_TOKEN
    return Breakdown(
        first,
        second,
        owner if transferred and later.remote else Owner.NONE,
        later.prefill.hidden_us if later.prefill is not None else 0,
        later.error_us,
    )


def breakdown_to_proto(one: Breakdown) -> latency_pb2.LatencyBreakdown:
    """The message of a breakdown."""
    message = latency_pb2.LatencyBreakdown(
        first_token=sum_to_proto(one.first),
        transfer_owner=_OWNERS[one.owner],
        transfer_exposed_us=one.exposed_us,
        transfer_hidden_us=one.hidden_us,
        clock_error_us=one.clock_error_us,
    )
    if one.second is not None:
        message.second_token.CopyFrom(sum_to_proto(one.second))
    return message


def breakdown_object(message: latency_pb2.LatencyBreakdown) -> dict[str, Any]:
    """A breakdown for JSON. Times are microseconds, and `second_token` is None where there is none."""
    second = message.second_token if message.HasField("second_token") else None
    owner = next((one for one, value in _OWNERS.items() if value == message.transfer_owner), "")
    return {
        "first_token": _sum_object(message.first_token),
        "second_token": _sum_object(second) if second is not None else None,
        "transfer_owner": str(owner) or None,
        "transfer_exposed_us": message.transfer_exposed_us,
        "transfer_hidden_us": message.transfer_hidden_us,
        "clock_error_us": message.clock_error_us,
    }


def _sum_object(message: latency_pb2.LatencySum) -> dict[str, Any]:
    parts = sum_from_proto(message).parts_us
    return {
        "total_us": message.total_us,
        "parts_us": {part.label: duration_us for part, duration_us in parts.items()},
    }


def _first_token_claims(
    steps: RequestSteps, attempt: AttemptSteps | None, at: int, sent: int
) -> Iterator[Claim]:
    yield from _router_claims(steps, attempt)
    yield Claim(TimePart.NETWORK, at, sent)
    if attempt is None:
        yield Claim(TimePart.ADMISSION, steps.arrival, sent)
        return
    yield from _prefill_claims(attempt)
    decode = attempt.decode
    if attempt.first_token_by == FirstTokenBy.PREFILL:
        if attempt.prefill is not None:
            yield Claim(TimePart.NETWORK, attempt.prefill.sent, at)
            # A task that was cancelled reports only when it made the token.
            yield Claim(TimePart.PREFILL, attempt.prefill.received, attempt.prefill.sent)
    elif attempt.first_token_by == FirstTokenBy.HIDDEN:
        if decode is not None:
            yield Claim(
                TimePart.TRANSFER_EXPOSED, _compute_end(attempt), decode.hidden_state_arrived
            )
            yield Claim(TimePart.FIRST_STEP, decode.hidden_state_arrived, decode.sampled)
            yield Claim(TimePart.NETWORK, decode.sampled, at)
    elif decode is not None:
        if decode.kv_arrived is not None:
            yield Claim(TimePart.TRANSFER_EXPOSED, _compute_end(attempt), decode.kv_arrived)
        ready = decode.kv_arrived or decode.reserved or decode.received
        yield from _step_claims(decode, ready, at, local=not attempt.remote)


def _second_token_claims(
    first: AttemptSteps, later: AttemptSteps, at: int, second_at: int
) -> Iterator[Claim]:
    if later is not first:
        yield Claim(TimePart.RETRY, at, later.route_start)
        yield from _placement_claims(later)
    yield from _prefill_claims(later)
    decode = later.decode
    if decode is None:
        return
    yield Claim(TimePart.TRANSFER_EXPOSED, _compute_end(later), decode.kv_arrived)
    times = (decode.kv_arrived, decode.token_received, decode.sampled)
    ready = max((time for time in times if time is not None), default=None)
    yield from _step_claims(decode, ready, second_at, local=not later.remote)
    yield Claim(TimePart.NETWORK, at, decode.token_received)


def _step_claims(
    decode: DecodeSteps, ready: int | None, at: int, *, local: bool
) -> Iterator[Claim]:
    """The wait for a step and the step, which made the token that the router received at `at`."""
    start = decode.step_start
    if start is None or (ready is not None and start < ready):
        start = ready
    yield Claim(TimePart.DECODE_WAIT, ready, start)
    yield Claim(TimePart.PREFILL if local else TimePart.FIRST_STEP, start, decode.first_token)
    yield Claim(TimePart.NETWORK, decode.first_token, at)


def _prefill_claims(attempt: AttemptSteps) -> Iterator[Claim]:
    prefill = attempt.prefill
    if prefill is None:
        return
    yield Claim(TimePart.PREFILL, prefill.compute_start, _compute_end(attempt))
    yield Claim(TimePart.BATCH_WAIT, prefill.received, prefill.compute_start)
    yield Claim(TimePart.NETWORK, attempt.pulled, prefill.received)


def _compute_end(attempt: AttemptSteps) -> int | None:
    """The end of prefill's computation. The clocks' error does not put it after the KV that it made."""
    end = attempt.prefill.compute_end if attempt.prefill is not None else None
    arrived = attempt.decode.kv_arrived if attempt.decode is not None else None
    if end is None or arrived is None:
        return end
    return min(end, arrived)


def _placement_claims(attempt: AttemptSteps) -> Iterator[Claim]:
    yield Claim(TimePart.ROUTE, attempt.route_start, attempt.start)
    reserved = attempt.queued or attempt.reserved
    if (
        attempt.queued is None
        and attempt.decode is not None
        and attempt.decode.reserved is not None
    ):
        # The decode worker goes on at once.
        reserved = attempt.decode.reserved
    yield Claim(TimePart.RESERVE, attempt.start, reserved)
    yield Claim(TimePart.QUEUE, attempt.queued, attempt.pulled)


def _router_claims(steps: RequestSteps, attempt: AttemptSteps | None) -> Iterator[Claim]:
    for start, end in steps.tokenize:
        yield Claim(TimePart.TOKENIZE, start, end)
    for one in steps.attempts:
        if one.message is not None:
            yield Claim(TimePart.NETWORK, *one.message)
    if steps.slot_wait is not None:
        yield Claim(TimePart.DECODE_WAIT, *steps.slot_wait)
    if not steps.attempts or attempt is None:
        return
    first_start = steps.attempts[0].route_start
    yield Claim(TimePart.ADMISSION, steps.arrival, first_start)
    yield Claim(TimePart.RETRY, first_start, attempt.route_start)
    yield from _placement_claims(attempt)


def _claims_of_failure(steps: RequestSteps, end: int) -> Iterator[Claim]:
    last = steps.attempts[-1] if steps.attempts else None
    yield from _router_claims(steps, last)
    if last is None:
        yield Claim(TimePart.ADMISSION, steps.arrival, end)
        return
    yield from _prefill_claims(last)
    # A queue that nothing has pulled from lasts to the end.
    if last.queued is not None and last.pulled is None:
        yield Claim(TimePart.QUEUE, last.queued, end)
    yield Claim(TimePart.RETRY, last.route_start, end)
