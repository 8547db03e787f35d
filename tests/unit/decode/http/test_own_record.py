"""The parts of the latency of a decode worker's own requests, on its own clock."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.trace import SpanContext

from headrace.inference.v1 import latency_pb2, receipt_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.deadlines import Deadline
from headrace_common.latency.breakdown import Breakdown, Owner
from headrace_common.latency.clocks import ClockPair
from headrace_common.latency.parts import TimePart
from headrace_decode.http.own_attempt import OwnRecord
from headrace_decode.timestamps import RequestTimestamps
from headrace_frontend.running import record as record_module
from headrace_frontend.running.record import RequestRecord

UNIX_NS = 10**18


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The monotonic clock in microseconds."""
    now_us = [0]
    clock = SimpleNamespace(monotonic_ns=lambda: 1_000 * now_us[0])
    monkeypatch.setattr(record_module, "time", clock)
    return now_us


def arrived() -> RequestRecord:
    """At 100, with its prompt as tokens from 110 to 130."""
    return RequestRecord(
        arrival=100,
        tokenize=(110, 130),
        arrival_ns=100_000,
        arrival_unix_ns=UNIX_NS,
        request_id="r",
        context=SpanContext(1, 2, False),
    )


def times(start_us: int, **after_us: int) -> RequestTimestamps:
    start_ns = UNIX_NS + 1_000 * start_us
    found = RequestTimestamps(ClockPair(start_ns, 1_000 * start_us, 0))
    for name, value in after_us.items():
        setattr(found.steps, f"{name}_us", value)
    return found


def parts_of(found: Breakdown) -> dict[str, int]:
    assert sum(found.first.parts_us.values()) == found.first.total_us
    return {part.label: duration_us for part, duration_us in found.first.parts_us.items()}


def admitted(record: RequestRecord, found: RequestTimestamps) -> OwnRecord:
    if not record.attempts:
        record.slot_acquired()
    attempt = OwnRecord(found.start.monotonic_ns // 1_000, times=found)
    record.attempts.append(attempt)
    return attempt


def respond(record: RequestRecord, first_us: int) -> None:
    """The first token came at `first_us`, and its message left 10 us later."""
    response: Any = SimpleNamespace(
        started=True,
        first_token_ns=1_000 * first_us,
        second_token_ns=0,
        first_message_ns=1_000 * first_us + 10_000,
    )
    record.response = response


async def test_a_request_that_was_cancelled_has_the_receipt_of_its_abort(clock: list[int]) -> None:
    record = arrived()
    attempt = admitted(record, times(200, reserved=20, step_start=30, first_token=50))
    respond(record, 260)
    ended: list[int] = []
    record.when_reported(lambda: ended.append(record.receipt_now().decode_device_us))
    assert not ended
    attempt.decoded(receipt_pb2.Receipt(decode_device_us=7))
    await asyncio.sleep(0)
    assert ended == [7]


async def test_the_sum_of_a_prompt_that_a_router_had_prefilled(clock: list[int]) -> None:
    record = arrived()
    clock[0] = 140
    record.slot_wanted()
    clock[0] = 200
    attempt = admitted(
        record, times(200, reserved=20, kv_arrived=700, step_start=710, first_token=750)
    )
    clock[0] = 230
    answer: asyncio.Future[prefill_pb2.EnqueueResponse] = asyncio.Future()

    async def prefill() -> prefill_pb2.EnqueueResponse:
        return await answer

    task = asyncio.create_task(prefill())
    attempt.asked(task)
    respond(record, 960)
    reported: list[Breakdown] = []
    record.when_reported(lambda: reported.append(record.break_down()))
    assert record.break_down().first[TimePart.QUEUE] == 0
    assert not reported
    clock[0] = 950
    steps = latency_pb2.TaskSteps(
        queued_us=10,
        pulled_us=60,
        received_us=80,
        compute_start_us=100,
        compute_end_us=600,
        first_write_us=300,
        last_write_us=640,
        sent_us=680,
        clock_error_us=3,
    )
    answer.set_result(prefill_pb2.EnqueueResponse(steps=steps))
    await record.wait_for_report(Deadline.after(5.0))
    await asyncio.sleep(0)
    (found,) = reported
    assert found.first.total_us == 970 - 100
    # The router has received the call at 250, as both messages took 20.
    assert parts_of(found) == {
        "admission": 20,
        "tokenize": 20,
        "decode_wait": 60 + 10,
        "reserve": 30,
        "network": 30 + 20 + 10 + 10,
        "queue": 50,
        "batch_wait": 20,
        "prefill": 500,
        "transfer_exposed": 50,
        "first_step": 40,
    }
    assert (found.owner, found.hidden_us) == (Owner.FIRST_TOKEN, 300)
    assert found.clock_error_us == 20 + 3


def test_a_request_without_a_token_waited_for_room(clock: list[int]) -> None:
    record = arrived()
    clock[0] = 140
    record.slot_wanted()
    clock[0] = 900
    found = record.break_down()
    assert parts_of(found) == {"admission": 20, "tokenize": 20, "decode_wait": 760}
