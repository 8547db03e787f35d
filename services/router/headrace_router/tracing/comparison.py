"""What other requests show of one: what is usual, and why no token came in its gaps. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import median_low
from typing import Final

from headrace.inference.v1 import latency_pb2, trace_pb2
from headrace_common.durations import unix_ns_from_timestamp
from headrace_common.latency.breakdown import Breakdown, breakdown_to_proto
from headrace_common.latency.parts import Sum, TimePart
from headrace_common.telemetry import schema
from headrace_frontend.running.record import Gap, RequestRecord
from headrace_router.tracing.attempt_record import RoutedAttempt
from headrace_router.tracing.record import routed_attempts

LIKE_MIN: Final = 8
_LIKE_MAX: Final = 128
# Prompts are about as long when they differ by a factor of 2 at most, or by so many tokens.
_TOKENS: Final = 64


def compare(
    trace: trace_pb2.Trace, request: RequestRecord, others: Sequence[RequestRecord]
) -> None:
    """Adds to the trace of the request what the others show. These may contain it."""
    usual = _usual(request, others)
    if usual is not None:
        trace.usual.CopyFrom(usual)
    tenants = _tenants_before(request, others)
    own_ns = request.arrival_unix_ns - request.arrival_ns
    details = {
        own_ns + gap.start_ns: _gap_detail(request, gap, others)
        for gap in request.gaps
        if not gap.cause
    }
    for span in trace.spans:
        detail = details.get(unix_ns_from_timestamp(span.start_time))
        if span.name == schema.SPAN_GAP and detail:
            span.attributes[schema.ATTRIBUTE_GAP_CAUSE] = detail
        elif span.name == schema.SPAN_QUEUE and tenants:
            span.attributes[schema.ATTRIBUTE_QUEUE_TENANTS] = tenants


def _tenants_before(request: RequestRecord, others: Iterable[RequestRecord]) -> str:
    """Such as "a: 3, b: 1": the prompts that prefill workers had while the last attempt in the queue was there."""
    waits = [(one.queued, one.pulled) for one in request.attempts if one.queued and one.pulled]
    queued, pulled = waits[-1] if waits else (0, 0)
    if pulled - queued < 1_000:
        return ""
    counts = Counter(
        other.payer[0]
        for other in others
        for one in other.attempts
        if 0 < (one.pulled or 0) < pulled
        if ((one.prefill and one.prefill.compute_end) or one.end) > queued
    )
    return ", ".join(f"{tenant}: {count}" for tenant, count in counts.most_common(4))


def _gap_detail(request: RequestRecord, gap: Gap, others: Iterable[RequestRecord]) -> str:
    """What the gap's decode worker and the router did meanwhile. Empty where nothing shows it."""
    for one in routed_attempts(request):
        if one.moved and gap.start_ns <= (move := one.moved.result()).end_ns <= gap.end_ns:
            return f"the answer moved there from {move.source}"
    times_us = gap.start_ns // 1_000, gap.end_ns // 1_000
    worker_id = _worker_at(request, times_us[1])
    waiting = Counter[bool]()
    going = 0
    for other in others:
        if other is request:
            continue
        tokens = _prompt_computed(other, worker_id, times_us)
        if tokens:
            return f"it computed {tokens:,} prompt tokens of {other.request_id}"
        first_ns, _, last_ns = other.tokens_ns
        if 0 < first_ns <= gap.start_ns and gap.end_ns <= last_ns:
            here = _worker_at(other, times_us[1]) == worker_id
            waited = any(_covers_half(one[:2], gap[:2]) for one in other.gaps)
            waiting[here] += waited
            going += here and not waited
    if waiting[False]:
        return f"requests on other workers without a token: {waiting[False]}"
    if going:
        return f"other requests on it with tokens: {going}"
    return f"other requests on it without a token: {waiting[True]}" if waiting[True] else ""


def _worker_at(request: RequestRecord, time_us: int) -> str:
    """The decode worker that the request had."""
    begun = [one for one in routed_attempts(request) if one.route_start < time_us]
    return begun[-1].worker_id("decode") if begun else ""


def _prompt_computed(request: RequestRecord, worker_id: str, times_us: tuple[int, int]) -> int:
    """The tokens of its prompt, if the decode worker computed them for at least half of that time."""
    for attempt in routed_attempts(request):
        decode = attempt.decode
        if decode is None or attempt.remote:
            continue
        start = decode.step_start or decode.reserved or decode.received
        computed = (start, decode.first_token or attempt.end)
        if attempt.worker_id("decode") == worker_id and _covers_half(computed, times_us):
            return _work(request)[1]
    return 0


def _covers_half(one: tuple[int, int], of: tuple[int, int]) -> bool:
    return 2 * (min(one[1], of[1]) - max(one[0], of[0])) >= of[1] - of[0]


def _usual(
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
    kind, tokens = _work(request)
    for other in others:
        if other is request or other.first_token is None or len(other.attempts) != 1:
            continue
        other_kind, other_tokens = _work(other)
        fewer, more = sorted((tokens, other_tokens))
        if other_kind == kind and more <= max(2 * fewer, fewer + _TOKENS):
            yield other


def _work(request: RequestRecord) -> tuple[tuple[object, ...], int]:
    """The kind of its work, and the tokens to compute."""
    last = request.attempts[-1] if request.attempts else None
    decision = last.decision if isinstance(last, RoutedAttempt) else None
    tokens = decision.missing_tokens if decision is not None else request.prompt_tokens
    return (request.model, last and (last.remote, last.first_token_by)), tokens
