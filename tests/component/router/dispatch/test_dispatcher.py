"""Requests through a real router to scripted workers: responses, retries and errors."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2, receipt_pb2, sampling_pb2
from headrace_common.errors import (
    DeadlineExceeded,
    Draining,
    QueueFull,
    TransferTimeout,
    Unauthenticated,
    WorkerGone,
)
from tests.kit.router import Rig, text_of
from tests.kit.workers import (
    FakeDecode,
    die,
    fail,
    hand_over,
    hang,
    refuse,
    reject,
    reply,
    reserve_and_die,
    reserved,
    stall,
    start_and_end,
)
from tests.waiting import forever, until


async def test_a_prompt_is_prefilled_remotely_and_answered(rig: Rig) -> None:
    decode = await rig.add_decode(reply("Paris"))
    prefill = await rig.add_prefill(hand_over)
    responses = await rig.ask("capital?", request_id="r1")
    assert text_of(responses) == "Paris"
    assert {response.request_id for response in responses} == {"r1"}
    assert len(responses[0].trace_id) == 32
    last = responses[-1]
    assert last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    assert last.usage == inference_pb2.Usage(
        prompt_tokens=8,
        completion_tokens=5,
        transferred_tokens=7,
        receipt=receipt_pb2.Receipt(attempts=1),
    )
    assert (last.timing.decode_worker_id, last.timing.prefill_worker_id) == ("d0", "p0")
    assert last.timing.attempts == 1
    assert 0 < last.timing.time_to_first_token.ToNanoseconds() <= last.timing.total.ToNanoseconds()
    (task,), (request,) = prefill.tasks, decode.requests
    assert bytes(task.token_ids) == b"capital"
    assert bytes(request.token_ids) == b"capital?"
    assert task.transfer_id == request.transfer_id
    assert task.decode_incarnation == request.incarnation == decode.member.incarnation
    assert task.decode_endpoint == decode.member.endpoint
    assert request.sampling.temperature == 1
    trace_id = responses[0].trace_id
    assert trace_id in task.traceparent
    assert decode.metadata[0]["traceparent"] == task.traceparent
    assert 20 < task.remaining.ToNanoseconds() / 1e9 < 30


async def test_a_decode_worker_that_leaves_is_asked_once(rig: Rig) -> None:
    """It costs no retry."""
    error = Draining("shutting down")
    rig.policy.retry_budget = 0
    rejecting, other = await rig.add_decodes(reject(error), reply("ok"))
    prefill = await rig.add_prefill(hand_over)
    responses = await rig.ask()
    assert text_of(responses) == "ok"
    assert responses[-1].timing.attempts == 2
    assert [task.transfer_id for task in prefill.tasks] == [other.requests[0].transfer_id]
    assert rejecting.requests[0].transfer_id != other.requests[0].transfer_id
    other.script = reject(error)
    last = await rig.error_of()
    assert (type(last), last.retry_after_s) == (type(error), error.retry_after_s)
    assert [len(rejecting.requests), len(other.requests), len(prefill.tasks)] == [2, 2, 1]


@pytest.mark.parametrize(
    ("behaviour", "attempts"),
    [
        (start_and_end, 2),
        (fail("TRANSFER_FAILED"), 2),
        # A task that had not started moves within the attempt.
        (die, 1),
        (refuse("DRAINING"), 1),
    ],
    ids=["end of the stream", "failed transfer", "death before the start", "drain"],
)
async def test_a_failed_prefill_is_repeated_by_another_worker(
    rig: Rig, behaviour: Any, attempts: int
) -> None:
    decode = await rig.add_decode(reply("ok"))
    bad = await rig.add_prefill(behaviour, credit=9)
    good = await rig.add_prefill(hand_over)
    responses = await rig.ask()
    assert text_of(responses) == "ok"
    assert responses[-1].timing.prefill_worker_id == "p1"
    assert responses[-1].timing.attempts == attempts
    assert len(bad.tasks) == len(good.tasks) == 1
    ids = [request.transfer_id for request in decode.requests]
    assert len(ids) == len(set(ids)) == attempts
    await until(lambda: decode.cancelled == set(ids[:-1]))


@pytest.mark.parametrize(
    ("behaviours", "remote"),
    [([die], [True, False]), ([fail("TRANSFER_FAILED")] * 4, [True, True, False])],
    ids=["no prefill worker left", "last attempt"],
)
async def test_decode_prefills_as_the_last_resort(
    rig: Rig, behaviours: list[Any], remote: list[bool]
) -> None:
    decode = await rig.add_decode(reply("ok"))
    for behaviour in behaviours:
        await rig.add_prefill(behaviour)
    assert await rig.text() == "ok"
    assert [request.remote_prefill for request in decode.requests] == remote


async def test_decode_dying_before_the_first_token_is_retried_elsewhere(rig: Rig) -> None:
    dying, _ = await rig.add_decodes(reserve_and_die, reply("ok"))
    prefill = await rig.add_prefill(
        lambda worker, task: (
            hand_over(worker, task) if task.decode_worker_id == "d1" else stall(worker, task)
        )
    )
    responses = await rig.ask()
    assert text_of(responses) == "ok"
    assert responses[-1].timing.decode_worker_id == "d1"
    lost = dying.requests[0].transfer_id
    # The queue drops the first task, or cancels it at the worker that pulled it.
    await until(lambda: prefill.cancels == [lost] or len(prefill.tasks) == 1)


async def test_a_router_that_is_rejected_reports_a_lost_worker(rig: Rig) -> None:
    """The client, with its valid key, gets no UNAUTHENTICATED."""
    refused = await rig.add_decode(reject(Unauthenticated("the token has expired")))
    error = await rig.error_of()
    assert isinstance(error, WorkerGone)
    assert "d0" in error.detail
    assert "rejected this router: the token has expired" in error.detail
    assert len(refused.requests) > 1


async def silent(worker: FakeDecode, request: Any) -> Any:
    await forever()
    yield


@pytest.mark.usefixtures("early_router_deadline")
@pytest.mark.parametrize(
    "script,behaviour,credit,waited_for",
    [
        (hang, stall, 4, "KV cache from prefill worker p0 to decode worker d0"),
        (hang, stall, 0, "a prefill worker to pull the prompt, 0 were ahead of it"),
        (hang, None, 0, "first token from decode worker d0"),
        (silent, None, 0, "a reservation on decode worker d0"),
    ],
)
async def test_the_deadline_error_names_the_awaited_event(
    rig: Rig, script: Any, behaviour: Any, credit: int, waited_for: str
) -> None:
    decode = await rig.add_decode(script)
    if behaviour is not None:
        await rig.add_prefill(behaviour, credit)
    error = await rig.error_of(timeout_s=6.0)
    assert isinstance(error, DeadlineExceeded)
    assert waited_for in error.detail
    await until(lambda: len(decode.cancelled) == 1)
    assert rig.router.queue.depth == 0


async def test_a_prompt_without_its_reservation_leaves_the_queue_before_it_is_computed(
    rig: Rig,
) -> None:
    released = asyncio.Event()

    async def reserve_for_a_while(worker: FakeDecode, request: Any) -> Any:
        yield reserved(request)
        await released.wait()
        raise TransferTimeout("missing (0, 0, 3)")

    await rig.add_decode(reserve_for_a_while)
    prefill = await rig.add_prefill(hand_over, credit=0)
    asking = asyncio.create_task(rig.error_of(timeout_s=5.0))
    await until(lambda: rig.router.queue.depth == 1)
    released.set()
    assert isinstance(await asking, TransferTimeout)
    assert rig.router.queue.depth == 0
    await prefill.give_credit(4)
    rig.decodes[0].script = reply("ok")
    assert await rig.text(request_id="later") == "ok"
    assert [task.request_id for task in prefill.tasks] == ["later"]


@pytest.mark.parametrize("credit", [0, 4])
async def test_a_cancelled_call_ends_all_work_at_once(rig: Rig, credit: int) -> None:
    decode = await rig.add_decode(hang)
    prefill = await rig.add_prefill(stall, credit)
    asking = asyncio.create_task(rig.ask(timeout_s=60))
    await until(lambda: bool(prefill.tasks) if credit else rig.router.queue.depth == 1)
    asking.cancel()
    start = time.monotonic()
    await until(lambda: len(decode.cancelled) == 1)
    await until(lambda: len(prefill.cancels) == (1 if credit else 0))
    await until(lambda: rig.router.queue.depth == 0)
    assert time.monotonic() - start < 30


async def test_a_full_prefill_queue_rejects_only_requests_that_ask_for_remote_prefill(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.router.queue, "max_queued_tasks", 1)
    decode = await rig.add_decode(hang)
    await rig.add_prefill(stall, credit=0)
    waiting = asyncio.create_task(rig.ask("xx"))
    await until(lambda: rig.router.queue.depth == 1)
    remote = inference_pb2.PREFILL_PLACEMENT_REMOTE
    assert isinstance(await rig.error_of(prefill_placement=remote), QueueFull)
    await until(lambda: len(decode.cancelled) == 1)
    decode.script = reply("ok")
    assert await rig.text() == "ok"
    assert [request.remote_prefill for request in decode.requests] == [True, True, False]
    waiting.cancel()


async def test_prompts_are_prefilled_remotely_again_once_the_queue_has_drained(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.router.queue, "max_queued_tasks", 1)
    decode = await rig.add_decode(reply("ok"))
    prefill = await rig.add_prefill(hand_over, credit=0)
    waiting = asyncio.create_task(rig.text())
    await until(lambda: rig.router.queue.depth == 1)
    assert await rig.text() == "ok"
    await prefill.give_credit(4)
    assert await waiting == "ok"
    assert await rig.text() == "ok"
    assert [request.remote_prefill for request in decode.requests] == [True, False, True]
    assert len(prefill.tasks) == 2
