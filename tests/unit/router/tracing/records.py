"""Records of requests that have ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from opentelemetry.trace import SpanContext, TraceFlags

from headrace_common.latency.breakdown import break_down
from headrace_common.latency.steps import AttemptSteps, DecodeSteps, PrefillSteps, RequestSteps
from headrace_common.telemetry import schema
from headrace_common.telemetry.later import PendingSpan
from headrace_kv.layout import WorkerRef
from headrace_router.tracing.request_record import AttemptFacts, RoutedRecord

TRACE_ID = 0xAB
START_UNIX_NS = 100
"""The requests last 70 ns, and their steps 1 ms."""


def decision(*, remote: bool) -> Any:
    worker = SimpleNamespace(ref=WorkerRef("decode-0", "aa"), endpoint="[::1]:7")
    return SimpleNamespace(
        worker=worker,
        remote=remote,
        explanation="cheapest",
        candidates=(),
        prefill=None,
        others=(),
    )


def attempt(*, remote: bool) -> AttemptFacts:
    return AttemptFacts(
        decision=decision(remote=remote),
        route_end=210,
        context=SpanContext(TRACE_ID, 77, False),
        transfer_id="x2",
        number=2,
        start=210,
        end=900,
        prefill_worker_id="prefill-0" if remote else "",
        tasks_ahead=3,
        priority="normal",
    )


def failed_attempt() -> AttemptFacts:
    return AttemptFacts(
        decision=decision(remote=True),
        route_end=110,
        context=SpanContext(TRACE_ID, 66, False),
        transfer_id="x1",
        number=1,
        start=110,
        end=190,
        error="it is full",
        reason="DECODE_FULL",
    )


def _steps(facts: AttemptFacts) -> AttemptSteps:
    if facts.error:
        return AttemptSteps(route_start=100, start=110)
    remote = facts.decision is not None and facts.decision.remote
    return AttemptSteps(
        route_start=200,
        start=210,
        reserved=250,
        queued=260 if remote else None,
        pulled=300 if remote else None,
        remote=remote,
        decode=DecodeSteps(220, reserved=240, kv_arrived=700 if remote else None, first_token=800),
        prefill=PrefillSteps(310, compute_start=320, compute_end=600, sent=710) if remote else None,
    )


def ended(
    *,
    trace_id: int = TRACE_ID,
    request_id: str = "r1",
    sampled: bool = False,
    error: str = "",
    attempts: tuple[AttemptFacts, ...] = (),
) -> RoutedRecord:
    """A request. Its clock of steps is that of its Unix times, in microseconds after START_UNIX_NS."""
    steps = RequestSteps(
        arrival=0,
        tokenize=((10, 90),) if attempts else (),
        attempts=tuple(map(_steps, attempts)),
        first_token=(800, len(attempts) - 1) if attempts else None,
    )
    flags = TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT
    root = PendingSpan(SpanContext(trace_id, 5, False, TraceFlags(flags)), None)
    root.set_attribute(schema.ATTRIBUTE_REQUEST_ID, request_id)
    first_unix_ns = START_UNIX_NS + 800_000 if attempts else 0
    return RoutedRecord(
        request_id=request_id,
        root=root,
        times_unix_ns=(START_UNIX_NS, START_UNIX_NS + (1_000_000 if attempts else 70)),
        arrival_ns=0,
        steps=steps,
        attempts=attempts,
        breakdown=break_down(steps, 1_000),
        differences={},
        tokens_unix_ns=(first_unix_ns, 0, first_unix_ns and first_unix_ns + 100_000),
        error=error,
    )
