"""The record of a request: what its root shows, and how long it waits for the report of its prefill."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.trace import SpanContext

from headrace.inference.v1 import inference_pb2
from headrace_common.deadlines import Deadline
from headrace_common.latency.clocks import ClockDifference
from headrace_common.telemetry import schema
from headrace_frontend.running.record import AttemptRecord, RequestRecord


def record_of(report: asyncio.Future[Any] | None) -> RequestRecord:
    record = RequestRecord(
        arrival=0,
        attempts=[AttemptRecord(0, outcome=report)],
        request_id="r",
        context=SpanContext(1, 2, False),
        arrival_ns=5_500,
        arrival_unix_ns=55_500,
        clock_error_ns=3_500,
    )
    response: Any = SimpleNamespace(first_token_ns=1)
    record.response = response
    return record


async def test_an_answer_without_a_prefill_does_not_wait() -> None:
    start_s = asyncio.get_running_loop().time()
    await record_of(None).wait_for_report(Deadline.after(60.0))
    assert asyncio.get_running_loop().time() == start_s


@pytest.mark.parametrize(("reported_s", "called_s"), [(0.4, 0.4), (9.0, 1.0)])
async def test_a_call_is_made_once_when_the_report_is_there_or_late(
    reported_s: float, called_s: float
) -> None:
    loop = asyncio.get_running_loop()
    report: asyncio.Future[None] = loop.create_future()
    loop.call_later(reported_s, report.set_result, None)
    start_s = loop.time()
    calls: list[float] = []
    record_of(report).when_reported(lambda: calls.append(loop.time() - start_s))
    await asyncio.sleep(10.0)
    assert calls == pytest.approx([called_s], abs=0.01)


def test_the_root_has_each_workers_clock_and_its_error_at_the_same_place() -> None:
    record = record_of(None)
    record.response = None
    record.close()
    record.attempts[0].differences.update(
        {
            "prefill-0": ClockDifference(3_000_550_000, 196_500),
            "decode-1": ClockDifference(-1_450_000, 76_500),
        }
    )
    attributes = next(record.spans()).attributes
    assert attributes is not None
    # The wall clock was 50 us ahead of the monotonic one.
    assert attributes[schema.ATTRIBUTE_CLOCK_WORKER_IDS] == ("prefill-0", "decode-1")
    assert attributes[schema.ATTRIBUTE_CLOCK_WORKERS_AHEAD_MS] == (3_000.5, -1.5)
    assert attributes[schema.ATTRIBUTE_CLOCK_WORKERS_ERROR_MS] == (0.2, 0.08)


@pytest.mark.parametrize("operation", ["chat", "text_completion"])
def test_a_chat_is_named_so_in_its_trace(operation: str) -> None:
    request = inference_pb2.GenerateRequest(conversation_id="c")
    if operation == "chat":
        request.chat.messages.add()
    record = record_of(None)
    prepared: Any = SimpleNamespace(
        payer=("default", "m", ""),
        tokenized_ns=(7_000, 9_000),
        served_name="m",
        token_ids=[1, 2, 3],
    )
    record.prepared(request, prepared)
    record.response = None
    record.close()
    root, tokenize = record.spans()
    assert root.attributes is not None
    assert root.attributes[schema.ATTRIBUTE_GEN_AI_OPERATION] == operation
    assert root.attributes[schema.ATTRIBUTE_GEN_AI_REQUEST_MODEL] == "m"
    assert root.attributes[schema.ATTRIBUTE_PROMPT_TOKENS] == 3
    assert root.attributes[schema.ATTRIBUTE_CONVERSATION_ID] == "c"
    assert (tokenize.start_time, tokenize.end_time) == (57_000, 59_000)
