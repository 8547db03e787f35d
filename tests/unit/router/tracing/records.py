"""Records of requests that have ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from opentelemetry.trace import SpanContext, TraceFlags

from headrace_common.latency.steps import DecodeSteps, PrefillSteps
from headrace_frontend.running.record import RequestRecord
from headrace_kv.layout import WorkerRef
from headrace_router.tracing.attempt_record import RoutedAttempt

TRACE_ID = 0xAB
START_UNIX_NS = 100
"""The requests last 70 ns, and their steps 1 ms."""


def decision(*, remote: bool, worker_id: str = "decode-0") -> Any:
    layout = SimpleNamespace(block_tokens=8)
    worker = SimpleNamespace(ref=WorkerRef(worker_id, "aa"), endpoint="[::1]:7", layout=layout)
    return SimpleNamespace(
        worker=worker,
        remote=remote,
        computes_from=0,
        explanation="cheapest",
        missing_tokens=8,
        candidates=(),
        prefill=None,
        others=(),
    )


def attempt(*, remote: bool) -> RoutedAttempt:
    return RoutedAttempt(
        route_start=200,
        start=210,
        reserved=250,
        queued=260 if remote else None,
        pulled=300 if remote else None,
        remote=remote,
        decode=DecodeSteps(220, reserved=240, kv_arrived=700 if remote else None, first_token=800),
        prefill=PrefillSteps(310, compute_start=320, compute_end=600, sent=710) if remote else None,
        decision=decision(remote=remote),
        route_end=210,
        context=SpanContext(TRACE_ID, 77, False),
        transfer_id="x2",
        number=2,
        end=900,
        prefill_worker_id="prefill-0" if remote else "",
        tasks_ahead=3,
        priority="normal",
    )


def failed_attempt() -> RoutedAttempt:
    return RoutedAttempt(
        route_start=100,
        start=110,
        decision=decision(remote=True),
        route_end=110,
        context=SpanContext(TRACE_ID, 66, False),
        transfer_id="x1",
        number=1,
        end=190,
        error="it is full",
        reason="DECODE_FULL",
    )


def ended(
    *attempts: RoutedAttempt,
    trace_id: int = TRACE_ID,
    request_id: str = "r1",
    sampled: bool = False,
    error: str = "",
) -> RequestRecord:
    """A request. Its clock of steps is that of its Unix times, in microseconds after START_UNIX_NS."""
    flags = TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT
    first_ns = 800_000 if attempts else 0
    return RequestRecord(
        arrival=0,
        tokenize=(10, 90) if attempts else None,
        attempts=list(attempts),
        first_token=(800, len(attempts) - 1) if attempts else None,
        request_id=request_id,
        context=SpanContext(trace_id, 5, False, TraceFlags(flags)),
        arrival_ns=0,
        arrival_unix_ns=START_UNIX_NS,
        end_unix_ns=START_UNIX_NS + (1_000_000 if attempts else 70),
        end_us=1_000,
        tokens_ns=(first_ns, 0, first_ns and first_ns + 100_000),
        error=error,
    )
