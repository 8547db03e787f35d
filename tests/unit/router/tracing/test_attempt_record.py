"""The record of a request: workers' reports on the router's clock, and when they are complete."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.trace import SpanContext

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import first_token_pb2, inference_pb2, sampling_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.deadlines import Deadline
from headrace_common.latency.parts import TimePart
from headrace_common.telemetry import schema
from headrace_frontend.running.attempt import AdmittedRequest, AttemptOutcome, finish_response
from headrace_frontend.running.record import RequestRecord
from headrace_kv.layout import WorkerRef
from headrace_router.prefill_queue.task import QueuedTask, TaskTerms
from headrace_router.tracing import attempt_record
from headrace_router.tracing.attempt_record import RoutedAttempt, WorkerClocks
from tests.kit.link import KeptEvents
from tests.unit.router.tracing.records import decision

DECODE, PREFILL = WorkerRef("decode-0", "aa"), WorkerRef("prefill-0", "bb")
AHEAD_NS = 3 * 10**9
STOP = sampling_pb2.FINISH_REASON_STOP


def queued_task() -> QueuedTask:
    layout: Any = None
    terms = TaskTerms(time.monotonic() + 9)
    return QueuedTask(
        prefill_pb2.PrefillTask(token_ids=range(19)), layout, terms, 1, lambda task: None
    )


def response_at(first_ns: int) -> Any:
    return SimpleNamespace(
        started=True, first_token_ns=first_ns, second_token_ns=0, first_message_ns=0
    )


async def started(clocks: WorkerClocks) -> tuple[RequestRecord, QueuedTask, int]:
    """A request with a first token, and with a task that a worker has. Its decode worker is 3 s ahead."""
    start_ns = time.monotonic_ns()
    record = RequestRecord(
        arrival=start_ns // 1_000,
        arrival_ns=start_ns,
        arrival_unix_ns=time.time_ns(),
        request_id="r",
        context=SpanContext(1, 2, False),
        # The decode worker computes the last one.
        prompt_tokens=20,
    )
    attempt = RoutedAttempt(start_ns // 1_000, worker_clocks=clocks)
    record.attempts.append(attempt)
    answer = KeptEvents()
    attempt.routed(decision(remote=True))
    attempt.opened(answer, first_token_pb2.FIRST_TOKEN_POLICY_DECODE)
    await asyncio.sleep(10e-6)
    answer.receive_reserved(decode_pb2.Reserved(end_token=5))
    unix_ns = answer.reserved_ns + AHEAD_NS
    answer.add_times(
        decode_pb2.AttemptTimes(
            received_unix_ns=unix_ns - 1_000, reserved_us=1, kv_arrived_us=700, first_token_us=900
        )
    )
    task = queued_task()
    attempt.enqueued(task)
    task.handed_to(PREFILL, time.monotonic())
    record.response = response_at(start_ns + 10**9)
    return record, task, start_ns


async def test_a_breakdown_waits_for_the_prefill_workers_report() -> None:
    clocks = WorkerClocks()
    record, task, _ = await started(clocks)
    calls: list[int] = []
    record.when_reported(lambda: calls.append(1))
    assert not calls
    await asyncio.sleep(10e-6)
    times = prefill_pb2.TaskTimes(
        received_unix_ns=task.pulled_ns - AHEAD_NS,
        compute_start_us=1,
        compute_end_us=500,
        sent_us=1,
    )
    task.end(None, prefill_pb2.TaskDone(times=times))
    await asyncio.wait_for(record.wait_for_report(Deadline.after(9)), 5)
    await asyncio.sleep(0)
    assert calls == [1]
    found = record.break_down()
    assert found.first[TimePart.PREFILL] >= 400
    assert found.first[TimePart.UNACCOUNTED] == 0
    for ref, ahead_ns in ((DECODE, AHEAD_NS), (PREFILL, -AHEAD_NS)):
        own_ns = time.time_ns() - time.monotonic_ns()
        difference = record.differences[ref.worker_id]
        assert abs(difference.ahead_ns + own_ns - ahead_ns) <= difference.error_ns + 10**6
    record.when_reported(lambda: calls.append(2))
    assert calls == [1, 2]
    attempt: Any = record.attempts[0]
    attempt.context = record.context
    _, compute = attempt.worker_spans(record, "prefill")
    assert compute.attributes[schema.ATTRIBUTE_TOKENS] == 19


async def test_the_usage_counts_what_either_worker_has_cached() -> None:
    record, task, _ = await started(WorkerClocks())
    usages: list[inference_pb2.Usage] = []

    async def count(cached_tokens: int) -> tuple[int, int]:
        """What is cached of a prompt of 20 tokens, and what is afterwards."""
        response: Any = SimpleNamespace(
            decode_worker=None,
            completion_tokens=1,
            first_token_ns=0,
            last_token_ns=0,
            finish=lambda reason, usage, timing: usages.append(usage),
        )
        prepared: Any = SimpleNamespace(token_ids=[1] * 20, keep_s=None, includes_latency=False)
        unused: Any = None
        request = AdmittedRequest(prepared, response, Deadline.after(9), record, unused, unused)
        await finish_response(request, AttemptOutcome(STOP, cached_tokens), attempts=1)
        return usages[-1].cached_tokens, usages[-1].stored_tokens

    assert await count(8) == (8, 16)
    task.end(None, prefill_pb2.TaskDone(cached_tokens=16))
    assert await count(8) == (16, 16)
    assert await count(19) == (19, 16)


async def test_a_report_that_never_comes_is_not_waited_for_long() -> None:
    record, _, _ = await started(WorkerClocks())
    called = asyncio.Event()
    record.when_reported(called.set)
    await asyncio.wait_for(called.wait(), 10)
    found = record.break_down()
    assert sum(found.first.parts_us.values()) == found.first.total_us


def test_the_clocks_of_the_last_workers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_record, "_WORKERS_MAX", 2)
    clocks = WorkerClocks()
    for name in ("a", "b", "a", "c"):
        clocks.clock(name).add_exchange(0, 5, 5, 10)
    assert clocks.clock("a").known
    assert not clocks.clock("b").known
