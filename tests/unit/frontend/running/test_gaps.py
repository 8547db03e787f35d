"""The long times without a token of an answer, and what they went to. In virtual time."""

from __future__ import annotations

import asyncio

from opentelemetry.trace import SpanContext

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.errors import WorkerGone
from headrace_common.latency.clocks import clocks_now
from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics.instruments import BucketCounts
from headrace_frontend.request.response_stream import ResponseStream
from headrace_frontend.running.record import AttemptRecord, RequestRecord, now_us
from headrace_kv.layout import WorkerRef
from tests.kit.requests import prepared

STEP_S = 0.01
Found = list[tuple[str, float, float]]


class Answer:
    """An answer of a request that arrives now, one token each 10 ms."""

    def __init__(self) -> None:
        unix_ns, start_ns, _ = clocks_now()
        self.record = RequestRecord(
            arrival=start_ns // 1_000,
            arrival_ns=start_ns,
            arrival_unix_ns=unix_ns,
            request_id="r",
            context=SpanContext(1, 2, False),
            attempts=[AttemptRecord(start_ns // 1_000)],
        )
        request = inference_pb2.GenerateRequest(
            text="prompt", sampling=sampling_pb2.SamplingParams(max_tokens=4_000)
        )
        counts = BucketCounts((0.005, 0.015, 0.025, 0.1, 1.0))
        self.response = ResponseStream(prepared(request), "trace", gaps=counts)
        self.record.response = self.response

    async def add(self, count: int, gap_s: float = STEP_S) -> None:
        for _ in range(count):
            await asyncio.sleep(gap_s)
            self.response.add_tokens([7])

    def end(self) -> Found:
        """The cause, the start after the arrival and the length of each gap, in seconds, as the trace has them."""
        self.record.ended(None)
        self.record.close()
        return [
            (
                str((span.attributes or {})[schema.ATTRIBUTE_GAP_CAUSE]),
                round(1e-9 * ((span.start_time or 0) - self.record.arrival_unix_ns), 2),
                round(1e-9 * ((span.end_time or 0) - (span.start_time or 0)), 2),
            )
            for span in self.record.spans()
            if span.name == schema.SPAN_GAP
        ]

    def finish(self) -> None:
        self.response.finish(
            sampling_pb2.FINISH_REASON_LENGTH, inference_pb2.Usage(), inference_pb2.Timing()
        )


async def test_a_steady_answer_has_no_gap() -> None:
    answer = Answer()
    await answer.add(100)
    # The answer may wait for the report of its prefill.
    await asyncio.sleep(1.0)
    answer.finish()
    assert answer.end() == []


async def test_the_longest_gaps_of_an_answer_are_found() -> None:
    answer = Answer()
    for stall_s in [0.5, *[0.03] * 20, 2.0]:
        await answer.add(10)
        await answer.add(1, stall_s)
    await answer.add(10)
    answer.finish()
    assert answer.end() == [("", 0.1, 0.5), ("", 3.3, 2.0)]


async def test_a_failed_attempt_is_the_cause_of_its_gap() -> None:
    answer = Answer()
    await answer.add(20)
    failed = answer.record.attempts[0]
    await asyncio.sleep(1.0)
    failed.error, failed.end = "gone", now_us()
    answer.record.attempts.append(AttemptRecord(now_us()))
    await answer.add(1, 2.0)
    await answer.add(20)
    answer.finish()
    assert answer.end() == [("failure", 0.2, 3.0)]


async def test_a_failure_that_ends_the_answer_has_a_gap() -> None:
    answer = Answer()
    await answer.add(20)
    await asyncio.sleep(1.0)
    failed = answer.record.attempts[0]
    failed.error, failed.end = "gone", now_us()
    answer.response.fail(WorkerGone("gone"))
    assert answer.end() == [("failure", 0.2, 1.0)]


async def test_a_client_that_does_not_read_is_the_cause() -> None:
    answer = Answer()
    await answer.add(20)
    drained = asyncio.Event()
    answer.response.attempt_started(WorkerRef("d", "1"), lambda: None, drained.set)
    assert not answer.response.add_tokens([7] * 1_100)
    await asyncio.sleep(30.0)
    await answer.response.next_message()
    assert drained.is_set()
    await answer.add(20)
    answer.finish()
    # The last messages wait as well.
    await asyncio.sleep(5.0)
    assert answer.end() == [("client", 0.2, 30.01), ("client", 30.4, 5.0)]
