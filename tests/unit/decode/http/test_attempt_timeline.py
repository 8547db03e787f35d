"""The parts of the latency of a decode worker's own requests, on its own clock."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.inference.v1 import latency_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace_common.deadlines import Deadline
from headrace_common.latency.breakdown import Breakdown, Owner
from headrace_common.latency.clocks import ClockPair
from headrace_common.latency.parts import TimePart
from headrace_decode.http import own_attempt as own_attempt_module
from headrace_decode.http.own_attempt import OwnTimeline
from headrace_decode.timestamps import RequestTimestamps
from headrace_frontend.running import timeline as timeline_module
from headrace_frontend.running.timeline import RequestTimeline

UNIX_NS = 10**18


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The monotonic clock in microseconds."""
    now_us = [0]
    clock = SimpleNamespace(monotonic_ns=lambda: 1_000 * now_us[0])
    for module in (timeline_module, own_attempt_module):
        monkeypatch.setattr(module, "time", clock)
    return now_us


def times(start_us: int, **after_us: int) -> RequestTimestamps:
    start_ns = UNIX_NS + 1_000 * start_us
    found = RequestTimestamps(ClockPair(start_ns, 1_000 * start_us, 0))
    for name, value in after_us.items():
        setattr(found, f"{name}_unix_ns", start_ns + 1_000 * value)
    return found


def parts_of(found: Breakdown) -> dict[str, int]:
    assert sum(found.first.parts_us.values()) == found.first.total_us
    return {part.label: duration_us for part, duration_us in found.first.parts_us.items()}


def admitted(timeline: RequestTimeline, found: RequestTimestamps) -> OwnTimeline:
    if not timeline.attempts:
        timeline.slot_acquired()
    attempt = OwnTimeline(found)
    timeline.attempts.append(attempt)
    return attempt


def respond(timeline: RequestTimeline, first_us: int) -> None:
    """The first token came at `first_us`, and its message left 10 us later."""
    times = SimpleNamespace(
        first_token_unix_ns=1_000 * first_us,
        second_token_unix_ns=0,
        first_message_unix_ns=1_000 * first_us + 10_000,
        monotonic_us=lambda unix_ns: unix_ns // 1_000,
    )
    response: Any = SimpleNamespace(started=True, times=times)
    timeline.responding(response)


async def test_the_sum_of_a_prompt_that_a_router_had_prefilled(clock: list[int]) -> None:
    timeline = RequestTimeline(100_000, UNIX_NS)
    clock[0] = 140
    timeline.tokenized((110_000, 130_000))
    timeline.slot_wanted()
    clock[0] = 200
    attempt = admitted(
        timeline, times(200, reserved=20, arrived=700, step_start=710, first_token=750)
    )
    clock[0] = 230
    answer: asyncio.Future[prefill_pb2.EnqueueResponse] = asyncio.Future()

    async def prefill() -> prefill_pb2.EnqueueResponse:
        return await answer

    task = asyncio.create_task(prefill())
    attempt.asked(task)
    respond(timeline, 960)
    reported: list[Breakdown] = []
    timeline.when_reported(lambda: reported.append(timeline.break_down()))
    assert timeline.break_down().first[TimePart.QUEUE] == 0
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
    await timeline.wait_for_report(Deadline.after(5.0))
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
    timeline = RequestTimeline(100_000, UNIX_NS)
    clock[0] = 140
    timeline.tokenized((110_000, 130_000))
    timeline.slot_wanted()
    clock[0] = 900
    found = timeline.break_down()
    assert parts_of(found) == {"admission": 20, "tokenize": 20, "decode_wait": 760}
