"""The sums of a request: its times to the first tokens as parts. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from headrace.inference.v1 import latency_pb2
from headrace_common.latency.parts import (
    Claim,
    Sum,
    TimePart,
    divide,
    sum_from_proto,
    sum_to_proto,
)
from headrace_common.latency.steps import (
    BY_DECODE,
    BY_HIDDEN,
    BY_PREFILL,
    AttemptSteps,
    DecodeSteps,
    RequestSteps,
)


class Owner(StrEnum):
    """The sum that contains the exposed transfer. The empty text stands for none."""

    NONE = ""
    FIRST_TOKEN = "first_token"
    SECOND_TOKEN = "second_token"


# A member of an Enum is found by a Python function.
OWNED_BY_NONE, OWNED_BY_FIRST, OWNED_BY_SECOND = Owner
_ADMISSION, _TOKENIZE, _ROUTE, _RETRY, _RESERVE, _QUEUE, *_LATER = TimePart
_BATCH_WAIT, _PREFILL, _TRANSFER_EXPOSED, _DECODE_WAIT, _FIRST_STEP, _NETWORK, _ = _LATER
_OWNERS = {
    Owner.NONE: latency_pb2.TRANSFER_OWNER_UNSPECIFIED,
    Owner.FIRST_TOKEN: latency_pb2.TRANSFER_OWNER_FIRST_TOKEN,
    Owner.SECOND_TOKEN: latency_pb2.TRANSFER_OWNER_SECOND_TOKEN,
}


class Breakdown(NamedTuple):
    """The sums of one request. Without a first token, `first` lasts to the end of the request."""

    first: Sum
    second: Sum | None = None
    owner: Owner = OWNED_BY_NONE
    hidden_us: int = 0
    clock_error_us: int = 0

    @property
    def exposed_us(self) -> int:
        """The exposed transfer in the owner's sum."""
        owner = self.second if self.owner == OWNED_BY_SECOND else self.first
        return owner[_TRANSFER_EXPOSED] if owner is not None and self.owner else 0


def break_down(steps: RequestSteps, end_us: int) -> Breakdown:
    """The sums of a request that has ended at `end_us`, or that has its first tokens."""
    if steps.first_token is None:
        return Breakdown(divide(steps.arrival, end_us, _claims_of_failure(steps, end_us)))
    at, index = steps.first_token
    attempt = steps.attempts[index] if index < len(steps.attempts) else None
    sent = max(at, steps.first_message or at)
    claims = _router_claims(steps, attempt, end_us)
    claims.append((_NETWORK, at, sent))
    if attempt is None:
        claims.append((_ADMISSION, steps.arrival, sent))
        return Breakdown(divide(steps.arrival, sent, claims))
    claims += _first_token_claims(attempt, at)
    first = divide(steps.arrival, sent, claims)
    second: Sum | None = None
    later = attempt
    by_decode = attempt.first_token_by == BY_DECODE
    if steps.second_token is not None and not by_decode:
        second_at, later_index = steps.second_token
        later = steps.attempts[later_index]
        second = divide(at, second_at, _second_token_claims(attempt, later, at, second_at))
    owner = OWNED_BY_NONE
    if later.remote and later.decode is not None and later.decode.kv_arrived is not None:
        owner = OWNED_BY_FIRST if by_decode else OWNED_BY_SECOND
    hidden_us = later.prefill.hidden_us if later.prefill is not None else 0
    return Breakdown(first, second, owner, hidden_us, later.error_us)


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


def _first_token_claims(attempt: AttemptSteps, at: int) -> list[Claim]:
    prefill, decode = attempt.prefill, attempt.decode
    claims = _prefill_claims(attempt)
    if attempt.first_token_by == BY_PREFILL:
        if prefill is not None:
            claims.append((_NETWORK, prefill.sent, at))
            # A task that was cancelled reports only when it made the token.
            claims.append((_PREFILL, prefill.received, prefill.sent))
    elif decode is None:
        return claims
    elif attempt.first_token_by == BY_HIDDEN:
        arrived, sampled = decode.hidden_state_arrived, decode.sampled
        claims.append((_TRANSFER_EXPOSED, _compute_end(attempt), arrived))
        claims.append((_FIRST_STEP, arrived, sampled))
        claims.append((_NETWORK, sampled, at))
    else:
        claims.append((_TRANSFER_EXPOSED, _compute_end(attempt), decode.kv_arrived))
        ready = decode.kv_arrived or decode.reserved or decode.received
        claims += _step_claims(attempt, decode, ready, at)
    return claims


def _second_token_claims(
    first: AttemptSteps, later: AttemptSteps, at: int, second_at: int
) -> list[Claim]:
    claims: list[Claim] = []
    if later is not first:
        claims = [(_RETRY, at, later.route_start), *_placement_claims(later, first)]
    claims += _prefill_claims(later)
    decode = later.decode
    if decode is None:
        return claims
    claims.append((_TRANSFER_EXPOSED, _compute_end(later), decode.kv_arrived))
    times = (decode.kv_arrived, decode.token_received, decode.sampled)
    ready = max((time for time in times if time is not None), default=None)
    claims += _step_claims(later, decode, ready, second_at)
    claims.append((_NETWORK, at, decode.token_received))
    return claims


def _step_claims(
    attempt: AttemptSteps, decode: DecodeSteps, ready: int | None, at: int
) -> tuple[Claim, ...]:
    """The wait for a step and the step, which made the token that the router received at `at`."""
    start = decode.step_start
    if start is None or (ready is not None and start < ready):
        start = ready
    return (
        (_DECODE_WAIT, ready, start),
        (_FIRST_STEP if attempt.remote else _PREFILL, start, decode.first_token),
        (_NETWORK, decode.first_token, at),
    )


def _prefill_claims(attempt: AttemptSteps) -> list[Claim]:
    prefill = attempt.prefill
    if prefill is None:
        return []
    return [
        (_PREFILL, attempt.parts_start or prefill.compute_start, _compute_end(attempt)),
        (_BATCH_WAIT, prefill.received, prefill.compute_start),
        (_NETWORK, attempt.pulled, prefill.received),
    ]


def _compute_end(attempt: AttemptSteps) -> int | None:
    """The end of prefill's computation. The clocks' error does not put it after the KV that it made."""
    end = attempt.prefill.compute_end if attempt.prefill is not None else None
    arrived = attempt.decode.kv_arrived if attempt.decode is not None else None
    if end is None or arrived is None:
        return end
    return min(end, arrived)


def _placement_claims(attempt: AttemptSteps, first: AttemptSteps) -> tuple[Claim, ...]:
    reserved = attempt.queued or attempt.reserved
    if (
        attempt.queued is None
        and attempt.decode is not None
        and attempt.decode.reserved is not None
    ):
        # The decode worker goes on at once.
        reserved = attempt.decode.reserved
    # A pause before an attempt follows the choice of its workers.
    chosen = attempt.start if attempt is first else attempt.route_end or attempt.start
    return (
        (_ROUTE, attempt.route_start, chosen),
        (_RETRY, chosen, attempt.start),
        (_RESERVE, attempt.start, reserved),
        (_QUEUE, attempt.queued, attempt.pulled),
    )


def _router_claims(steps: RequestSteps, attempt: AttemptSteps | None, end: int) -> list[Claim]:
    claims: list[Claim] = []
    claims += [(_TOKENIZE, *one) for one in (steps.fetch, steps.tokenize) if one is not None]
    for one in steps.attempts:
        if one.message is not None:
            claims += ((_NETWORK, *one.message),)
    claims.append((_DECODE_WAIT, steps.slot_start, steps.slot_end or end))
    if attempt is not None:
        first_start = steps.attempts[0].route_start
        claims.append((_ADMISSION, steps.arrival, first_start))
        claims.append((_RETRY, first_start, attempt.route_start))
        claims += _placement_claims(attempt, steps.attempts[0])
    return claims


def _claims_of_failure(steps: RequestSteps, end: int) -> list[Claim]:
    last = steps.attempts[-1] if steps.attempts else None
    claims = _router_claims(steps, last, end)
    if last is None:
        claims.append((_ADMISSION, steps.arrival, end))
        return claims
    claims += _prefill_claims(last)
    # A queue that nothing has pulled from lasts to the end.
    if last.pulled is None:
        claims.append((_QUEUE, last.queued, end))
    claims.append((_RETRY, last.route_start, end))
    return claims
