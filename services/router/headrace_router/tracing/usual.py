"""What is usual for a request: the medians over like requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import median_low
from typing import Final

from headrace.inference.v1 import latency_pb2
from headrace_common.latency.breakdown import Breakdown, breakdown_to_proto
from headrace_common.latency.parts import Sum, TimePart
from headrace_frontend.running.record import RequestRecord
from headrace_router.tracing.attempt_record import RoutedAttempt

LIKE_MIN: Final = 8
_LIKE_MAX: Final = 128
# Prompts are about as long when they differ by a factor of 2 at most, or by so many tokens.
_TOKENS: Final = 64


def usual_of(
    request: RequestRecord, others: Iterable[RequestRecord]
) -> latency_pb2.LatencyBreakdown | None:
    """The medians over the first 128 of `others` that are like the request. None if fewer than 8 are."""
    like = [one.break_down() for one in islice(_like(request, others), _LIKE_MAX)]
    if len(like) < LIKE_MIN:
        return None
    seconds = [one.second for one in like if one.second is not None]
    second = _medians(seconds) if seconds else None
    return breakdown_to_proto(Breakdown(_medians([one.first for one in like]), second))


def _medians(sums: Sequence[Sum]) -> Sum:
    parts = {part: median_low([one[part] for one in sums]) for part in TimePart}
    return Sum(sum(parts.values()), {part: time_us for part, time_us in parts.items() if time_us})


def _like(request: RequestRecord, others: Iterable[RequestRecord]) -> Iterable[RequestRecord]:
    """Those with a first token of their only attempt, the same work, and about as many tokens to compute."""
    kind, tokens = _kind(request), _computed_tokens(request)
    for other in others:
        if other is request or other.first_token is None or len(other.attempts) != 1:
            continue
        fewer, more = sorted((tokens, _computed_tokens(other)))
        if _kind(other) == kind and more <= max(2 * fewer, fewer + _TOKENS):
            yield other


def _kind(request: RequestRecord) -> tuple[object, ...]:
    last = request.attempts[-1] if request.attempts else None
    return request.model, last and (last.remote, last.first_token_by)


def _computed_tokens(request: RequestRecord) -> int:
    last = request.attempts[-1] if request.attempts else None
    decision = last.decision if isinstance(last, RoutedAttempt) else None
    return decision.missing_tokens if decision is not None else request.prompt_tokens
