"""Requests through a real router to scripted workers: responses, retries and errors."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.errors import (
    DeadlineExceeded,
    DecodeFull,
    Draining,
    HeadraceError,
    InvalidRequest,
    NoDecodeWorker,
    QueueFull,
    StaleIncarnation,
    TransferFailed,
    TransferTimeout,
    Unauthenticated,
    WorkerGone,
)
from tests.component.router.fakes import (
    FakeDecode,
    Rig,
    die,
    die_after,
    fail,
    finished,
    full,
    hand_over,
    hang,
    refuse,
    reject,
    reply,
    reserved,
    stall,
    start_and_die,
    text_of,
    tokens,
)
from tests.waiting import until


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
        prompt_tokens=8, completion_tokens=5, transferred_tokens=7
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
    assert 8 < task.deadline_time.ToNanoseconds() / 1e9 - time.time() < 10


async def test_a_cached_prompt_needs_no_prefill_worker(rig: Rig) -> None:
    async def cached(worker: FakeDecode, request: Any) -> Any:
        yield reserved(request, start=len(request.token_ids) - 1)
        yield tokens("ok")
        yield finished(request)

    await rig.add_decode(cached)
    prefill = await rig.add_prefill(hand_over)
    assert text_of(await rig.ask()) == "ok"
    assert not prefill.tasks


async def test_without_prefill_workers_decode_prefills(rig: Rig) -> None:
    decode = await rig.add_decode(reply("ok"))
    responses = await rig.ask(prefill_placement=inference_pb2.PREFILL_PLACEMENT_REMOTE)
    assert text_of(responses) == "ok"
    assert not decode.requests[0].remote_prefill
    assert responses[-1].timing.prefill_worker_id == ""


async def test_without_decode_workers_the_model_is_unavailable(rig: Rig) -> None:
    await rig.add_prefill(hand_over)
    error = await rig.error_of()
    assert isinstance(error, NoDecodeWorker)
    assert error.retry_after_s


async def test_an_invalid_request_is_rejected_without_workers(rig: Rig) -> None:
    error = await rig.error_of(sampling=sampling_pb2.SamplingParams(top_p=2), model="x")
    assert isinstance(error, InvalidRequest)
    assert set(error.violations) == {"model", "sampling.top_p"}


async def test_a_full_decode_worker_is_skipped(rig: Rig) -> None:
    first, second = await rig.add_decode(full), await rig.add_decode(reply("ok"))
    await rig.prefer(first)
    responses = await rig.ask()
    assert text_of(responses) == "ok"
    assert responses[-1].timing.attempts == 2
    assert first.requests[0].transfer_id != second.requests[0].transfer_id


@pytest.mark.parametrize(
    "error", [Draining("shutting down"), StaleIncarnation("restarted")], ids=lambda e: e.reason
)
async def test_a_decode_worker_that_leaves_is_asked_once_and_costs_no_retry(
    rig: Rig, error: HeadraceError
) -> None:
    rig.policy.policy.retry_budget = 0
    leaving, other = await rig.add_decode(reject(error)), await rig.add_decode(reply("ok"))
    await rig.prefer(leaving)
    responses = await rig.ask()
    assert text_of(responses) == "ok"
    assert responses[-1].timing.attempts == 2
    other.script = reject(error)
    assert isinstance(await rig.error_of(), type(error))
    assert (len(leaving.requests), len(other.requests)) == (2, 2)


async def test_when_all_decode_workers_are_full_the_error_names_a_retry_delay(rig: Rig) -> None:
    await rig.add_decode(full)
    await rig.add_decode(full)
    prefill = await rig.add_prefill(hand_over)
    error = await rig.error_of()
    assert isinstance(error, DecodeFull)
    assert error.retry_after_s == 0.25
    assert not prefill.tasks


@pytest.mark.parametrize(
    "behaviour",
    [start_and_die, fail("INTERNAL"), fail("TRANSFER_FAILED")],
    ids=["death", "internal error", "failed transfer"],
)
async def test_a_failed_prefill_is_repeated_by_another_worker(rig: Rig, behaviour: Any) -> None:
    decode = await rig.add_decode(reply("ok"))
    bad = await rig.add_prefill(behaviour, credit=9)
    good = await rig.add_prefill(hand_over)
    responses = await rig.ask()
    assert text_of(responses) == "ok"
    assert responses[-1].timing.prefill_worker_id == "p1"
    assert responses[-1].timing.attempts == 2
    assert len(bad.tasks) == len(good.tasks) == 1
    first, second = decode.requests
    assert first.transfer_id != second.transfer_id
    await until(lambda: first.transfer_id in decode.cancelled)


@pytest.mark.parametrize("behaviour", [die, refuse("DRAINING")], ids=["death", "drain"])
async def test_a_prefill_that_had_not_started_moves_to_another_worker_in_the_same_attempt(
    rig: Rig, behaviour: Any
) -> None:
    decode = await rig.add_decode(reply("ok"))
    bad = await rig.add_prefill(behaviour, credit=9)
    good = await rig.add_prefill(hand_over)
    responses = await rig.ask()
    assert text_of(responses) == "ok"
    assert responses[-1].timing.prefill_worker_id == "p1"
    assert responses[-1].timing.attempts == 1
    assert len(bad.tasks) == len(good.tasks) == len(decode.requests) == 1


async def test_after_the_death_of_the_only_prefill_worker_decode_prefills(rig: Rig) -> None:
    decode = await rig.add_decode(reply("ok"))
    await rig.add_prefill(die)
    responses = await rig.ask()
    assert text_of(responses) == "ok"
    assert [request.remote_prefill for request in decode.requests] == [True, False]


async def test_the_last_attempt_prefills_on_decode(rig: Rig) -> None:
    decode = await rig.add_decode(reply("ok"))
    for _ in range(4):
        await rig.add_prefill(fail("TRANSFER_FAILED"))
    assert text_of(await rig.ask()) == "ok"
    assert [request.remote_prefill for request in decode.requests] == [True, True, False]


async def test_the_retry_budget_of_the_policy_is_kept(rig: Rig) -> None:
    rig.policy.policy.retry_budget = 0
    decode = await rig.add_decode(reply("ok"))
    await rig.add_prefill(fail("TRANSFER_FAILED"))
    assert isinstance(await rig.error_of(), TransferFailed)
    assert len(decode.requests) == 1


async def test_short_prompts_stay_on_decode_by_policy(rig: Rig) -> None:
    rig.policy.policy.local_prefill_max_tokens = 10
    decode = await rig.add_decode(reply("ok"))
    await rig.add_prefill(hand_over)
    await rig.ask("x" * 10)
    await rig.ask("x" * 11)
    assert [request.remote_prefill for request in decode.requests] == [False, True]


async def test_decode_dying_before_the_first_token_is_retried_elsewhere(rig: Rig) -> None:
    dying = await rig.add_decode(die_after(""))
    await rig.add_decode(reply("ok"))
    await rig.prefer(dying)
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


async def test_a_rejected_ticket_is_reported_as_a_lost_worker(rig: Rig) -> None:
    """Each retry has a new ticket: the first one may have expired while its worker stood still."""
    refused = await rig.add_decode(reject(Unauthenticated("the ticket has expired")))
    error = await rig.error_of()
    assert isinstance(error, WorkerGone)
    assert "d0" in error.detail
    assert "rejected this router's ticket: the ticket has expired" in error.detail
    tickets = [request.ticket for request in refused.requests]
    assert len(tickets) == len(set(tickets)) > 1


@pytest.mark.usefixtures("early_router_deadline")
@pytest.mark.parametrize(
    "behaviour,credit,waited_for",
    [
        (stall, 4, "KV cache from prefill worker p0 to decode worker d0"),
        (stall, 0, "a prefill worker to pull the prompt, 0 were ahead of it"),
        (None, 0, "first token from decode worker d0"),
    ],
)
async def test_the_deadline_error_names_the_awaited_event(
    rig: Rig, behaviour: Any, credit: int, waited_for: str
) -> None:
    decode = await rig.add_decode(hang)
    if behaviour is not None:
        await rig.add_prefill(behaviour, credit)
    error = await rig.error_of(timeout_s=6.0)
    assert isinstance(error, DeadlineExceeded)
    assert waited_for in error.detail
    await until(lambda: len(decode.cancelled) == 1, 1.0)
    assert rig.router.queue.depth == 0


async def test_missing_keys_are_reported_when_no_time_is_left_for_a_retry(rig: Rig) -> None:
    async def incomplete(worker: FakeDecode, request: Any) -> Any:
        yield reserved(request)
        raise TransferTimeout("missing (0, 0, 3)")

    decode = await rig.add_decode(incomplete)
    await rig.add_prefill(stall)
    error = await rig.error_of(timeout_s=1.0)
    assert isinstance(error, TransferTimeout)
    assert "missing (0, 0, 3)" in error.detail
    assert len(decode.requests) == 1
    assert isinstance(await rig.error_of(timeout_s=10.0), TransferTimeout)
    assert len(decode.requests) > 2


@pytest.mark.usefixtures("early_router_deadline")
async def test_a_silent_decode_worker_is_named_when_the_deadline_passes(rig: Rig) -> None:
    async def silent(worker: FakeDecode, request: Any) -> Any:
        await asyncio.sleep(60)
        yield

    await rig.add_decode(silent)
    error = await rig.error_of(timeout_s=6.0)
    assert "a reservation on decode worker d0" in error.detail


@pytest.mark.parametrize("credit", [0, 4])
async def test_a_cancelled_call_ends_all_work_within_a_second(rig: Rig, credit: int) -> None:
    decode = await rig.add_decode(hang)
    prefill = await rig.add_prefill(stall, credit)
    call = rig.stub.Generate(inference_pb2.GenerateRequest(text="a prompt"), timeout=30)
    reading = asyncio.create_task(call.read())
    await until(lambda: bool(prefill.tasks) if credit else rig.router.queue.depth == 1)
    call.cancel()
    start = time.monotonic()
    await until(lambda: len(decode.cancelled) == 1)
    await until(lambda: len(prefill.cancels) == (1 if credit else 0))
    await until(lambda: rig.router.queue.depth == 0)
    assert time.monotonic() - start < 1
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_stop_string_ends_decode_and_is_not_sent(rig: Rig) -> None:
    async def endless(worker: FakeDecode, request: Any) -> Any:
        yield reserved(request)
        for letter in "one two" + "x" * 1_000:
            yield tokens(letter)
            await asyncio.sleep(0.002)

    decode = await rig.add_decode(endless)
    responses = await rig.ask(sampling=sampling_pb2.SamplingParams(stop=[" two"]))
    assert text_of(responses) == "one"
    assert responses[-1].finish_reason == sampling_pb2.FINISH_REASON_STOP
    assert responses[-1].usage.completion_tokens == 7
    assert not decode.requests[0].sampling.stop
    await until(lambda: len(decode.cancelled) == 1, 1.0)


async def test_placed_requests_count_before_workers_report_them(rig: Rig) -> None:
    first, second = await rig.add_decode(hang), await rig.add_decode(hang)
    calls = [rig.stub.Generate(inference_pb2.GenerateRequest(text="x"), timeout=30) for _ in "1234"]
    readers = [asyncio.create_task(call.read()) for call in calls]
    await until(lambda: len(first.requests) + len(second.requests) == 4)
    assert len(first.requests) == len(second.requests) == 2
    for call in calls:
        call.cancel()
    await asyncio.gather(*readers, return_exceptions=True)


async def test_a_full_prefill_queue_rejects_only_requests_that_ask_for_remote_prefill() -> None:
    rig = await Rig(max_queued_tasks=1).start()
    try:
        decode = await rig.add_decode(hang)
        await rig.add_prefill(stall, credit=0)
        call = rig.stub.Generate(inference_pb2.GenerateRequest(text="xx"), timeout=30)
        reading = asyncio.create_task(call.read())
        await until(lambda: rig.router.queue.depth == 1)
        remote = inference_pb2.PREFILL_PLACEMENT_REMOTE
        assert isinstance(await rig.error_of(prefill_placement=remote), QueueFull)
        await until(lambda: len(decode.cancelled) == 1, 1.0)
        decode.script = reply("ok")
        assert text_of(await rig.ask()) == "ok"
        assert [request.remote_prefill for request in decode.requests] == [True, True, False]
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    finally:
        await rig.close()


async def test_a_draining_router_rejects_new_requests(rig: Rig) -> None:
    await rig.add_decode(reply("ok"))
    rig.router.inference.drain()
    assert isinstance(await rig.error_of(), Draining)


async def test_a_worker_that_left_the_registry_finishes_its_responses(rig: Rig) -> None:
    async def slow(worker: FakeDecode, request: Any) -> Any:
        yield reserved(request)
        yield tokens("a")
        await asyncio.sleep(0.3)
        yield tokens("b")
        yield finished(request)

    decode = await rig.add_decode(slow)
    asking = asyncio.create_task(rig.ask())
    await until(lambda: len(decode.requests) == 1)
    rig.router.workers.update([])
    assert text_of(await asking) == "ab"
    assert isinstance(await rig.error_of(), NoDecodeWorker)


async def test_models_are_listed_with_their_workers(rig: Rig) -> None:
    empty = await rig.stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5)
    assert not empty.models
    await rig.add_decode(hang)
    await rig.add_decode(hang)
    rig.decodes[1].member.max_model_len = 512
    rig.refresh()
    await rig.add_prefill(stall)
    listed = await rig.stub.ListModels(inference_pb2.ListModelsRequest(), timeout=5)
    assert list(listed.models) == [
        inference_pb2.Model(
            name="sim", max_model_len=512, prefill_worker_count=1, decode_worker_count=2
        )
    ]
