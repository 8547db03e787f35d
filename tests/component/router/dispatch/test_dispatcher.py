"""Requests through a real router to scripted workers: what succeeds, what is retried, what fails by name."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import grpc.aio
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
from headrace_common.rpc.status import error_from_rpc
from tests.component.router.fakes import (
    FakeDecode,
    Rig,
    die,
    die_after,
    eventually,
    fail,
    finished,
    full,
    hand_over,
    hang,
    refuse,
    reserved,
    say,
    stall,
    start_and_die,
    text_of,
    tokens,
)


async def _error(rig: Rig, timeout_s: float = 10.0, **fields: Any) -> HeadraceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.ask(timeout_s=timeout_s, **fields)
    return error_from_rpc(caught.value)


async def test_a_prompt_is_prefilled_remotely_and_answered(rig: Rig) -> None:
    decode = await rig.add_decode(say("Paris"))
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
    decode = await rig.add_decode(say("ok"))
    responses = await rig.ask(prefill_placement=inference_pb2.PREFILL_PLACEMENT_REMOTE)
    assert text_of(responses) == "ok"
    assert not decode.requests[0].remote_prefill
    assert responses[-1].timing.prefill_worker_id == ""


async def test_without_decode_workers_the_model_is_unavailable(rig: Rig) -> None:
    await rig.add_prefill(hand_over)
    error = await _error(rig)
    assert isinstance(error, NoDecodeWorker)
    assert error.retry_after_s


async def test_a_bad_request_is_refused_whoever_is_there(rig: Rig) -> None:
    error = await _error(rig, sampling=sampling_pb2.SamplingParams(top_p=2), model="x")
    assert isinstance(error, InvalidRequest)
    assert set(error.violations) == {"model", "sampling.top_p"}


async def test_a_full_decode_worker_is_passed_over(rig: Rig) -> None:
    first, second = await rig.add_decode(full), await rig.add_decode(say("ok"))
    second.running_requests = 5
    await rig.loads_known()
    responses = await rig.ask()
    assert text_of(responses) == "ok"
    assert responses[-1].timing.attempts == 2
    assert first.requests[0].transfer_id != second.requests[0].transfer_id


async def test_when_all_are_full_the_client_learns_when_to_come_back(rig: Rig) -> None:
    await rig.add_decode(full)
    await rig.add_decode(full)
    prefill = await rig.add_prefill(hand_over)
    error = await _error(rig)
    assert isinstance(error, DecodeFull)
    assert error.retry_after_s == 0.25
    assert not prefill.tasks


@pytest.mark.parametrize(
    "behaviour",
    [
        start_and_die,
        *map(fail, ("INTERNAL", "TRANSFER_FAILED", "DRAINING", "QUEUE_FULL", "CANCELLED")),
    ],
)
async def test_a_failed_prefill_is_done_again_by_another_worker(rig: Rig, behaviour: Any) -> None:
    decode = await rig.add_decode(say("ok"))
    bad = await rig.add_prefill(behaviour, credit=9)
    good = await rig.add_prefill(hand_over)
    responses = await rig.ask()
    assert text_of(responses) == "ok"
    assert responses[-1].timing.prefill_worker_id == "p1"
    assert responses[-1].timing.attempts == 2
    assert len(bad.tasks) == len(good.tasks) == 1
    first, second = decode.requests
    assert first.transfer_id != second.transfer_id
    await eventually(lambda: first.transfer_id in decode.cancelled)


@pytest.mark.parametrize("behaviour", [die, *map(refuse, ("DRAINING", "QUEUE_FULL"))])
async def test_a_prefill_that_had_not_begun_goes_to_another_worker_in_the_same_attempt(
    rig: Rig, behaviour: Any
) -> None:
    decode = await rig.add_decode(say("ok"))
    bad = await rig.add_prefill(behaviour, credit=9)
    good = await rig.add_prefill(hand_over)
    responses = await rig.ask()
    assert text_of(responses) == "ok"
    assert responses[-1].timing.prefill_worker_id == "p1"
    assert responses[-1].timing.attempts == 1
    assert len(bad.tasks) == len(good.tasks) == len(decode.requests) == 1


async def test_a_dying_only_prefill_worker_leaves_the_prompt_to_decode(rig: Rig) -> None:
    decode = await rig.add_decode(say("ok"))
    await rig.add_prefill(die)
    responses = await rig.ask()
    assert text_of(responses) == "ok"
    assert [request.remote_prefill for request in decode.requests] == [True, False]


async def test_the_last_attempt_prefills_on_decode(rig: Rig) -> None:
    decode = await rig.add_decode(say("ok"))
    for _ in range(4):
        await rig.add_prefill(fail("TRANSFER_FAILED"))
    assert text_of(await rig.ask()) == "ok"
    assert [request.remote_prefill for request in decode.requests] == [True, True, False]


async def test_the_policys_retry_budget_is_kept(rig: Rig) -> None:
    rig.policy.policy.retry_budget = 0
    decode = await rig.add_decode(say("ok"))
    await rig.add_prefill(fail("TRANSFER_FAILED"))
    assert isinstance(await _error(rig), TransferFailed)
    assert len(decode.requests) == 1


async def test_short_prompts_stay_on_decode_by_policy(rig: Rig) -> None:
    rig.policy.policy.local_prefill_max_tokens = 10
    decode = await rig.add_decode(say("ok"))
    await rig.add_prefill(hand_over)
    await rig.ask("x" * 10)
    await rig.ask("x" * 11)
    assert [request.remote_prefill for request in decode.requests] == [False, True]


async def test_decode_dying_before_the_first_token_is_retried_elsewhere(rig: Rig) -> None:
    dying = await rig.add_decode(die_after(""))
    spare = await rig.add_decode(say("ok"))
    spare.running_requests = 5
    prefill = await rig.add_prefill(stall)
    prefill.behaviour = lambda worker, task: (
        hand_over(worker, task) if task.decode_worker_id == "d1" else stall(worker, task)
    )
    await rig.loads_known()
    responses = await rig.ask()
    assert text_of(responses) == "ok"
    assert responses[-1].timing.decode_worker_id == "d1"
    lost = dying.requests[0].transfer_id
    await eventually(lambda: prefill.cancels == [lost] or len(prefill.tasks) == 1)


def turn_away(error: HeadraceError) -> Any:
    """Of a decode worker that takes nothing."""

    async def script(worker: FakeDecode, request: Any) -> Any:
        raise error
        yield  # type: ignore[unreachable]

    return script


async def add_spare(rig: Rig) -> FakeDecode:
    """A decode worker that says "ok", and is busier than those before it."""
    spare = await rig.add_decode(say("ok"))
    spare.running_requests = 5
    await rig.loads_known()
    return spare


async def test_a_ticket_that_expired_on_its_way_is_written_anew(rig: Rig) -> None:
    refused = await rig.add_decode(turn_away(Unauthenticated("the ticket has expired")))
    spare = await add_spare(rig)
    responses = await rig.ask()
    assert text_of(responses) == "ok"
    assert responses[-1].timing.attempts == 2
    tickets = {worker.requests[0].ticket for worker in (refused, spare)}
    assert len(tickets) == 2


async def test_a_refused_ticket_is_not_the_clients_fault(rig: Rig) -> None:
    """And the next one may do: this one may have lain before a worker that stood still."""
    refused = await rig.add_decode(turn_away(Unauthenticated("the ticket has expired")))
    error = await _error(rig)
    assert isinstance(error, WorkerGone)
    assert "d0" in error.detail
    assert "rejected this router's ticket: the ticket has expired" in error.detail
    tickets = [request.ticket for request in refused.requests]
    assert len(tickets) == len(set(tickets)) > 1


async def test_workers_that_left_or_began_anew_cost_no_attempt(rig: Rig) -> None:
    rig.policy.policy.retry_budget = 1
    for error in (StaleIncarnation("another one"), Draining("leaving"), StaleIncarnation("again")):
        await rig.add_decode(turn_away(error))
    await add_spare(rig)
    responses = await rig.ask()
    assert text_of(responses) == "ok"
    assert responses[-1].timing.attempts == 4


@pytest.mark.parametrize(
    "behaviour,credit,words",
    [
        (stall, 4, "KV cache from prefill worker p0 to decode worker d0"),
        (stall, 0, "a prefill worker to pull the prompt, 0 were ahead of it"),
        (None, 0, "first token from decode worker d0"),
    ],
)
async def test_a_passed_deadline_names_what_was_waited_for(
    rig: Rig, behaviour: Any, credit: int, words: str
) -> None:
    decode = await rig.add_decode(hang)
    if behaviour is not None:
        await rig.add_prefill(behaviour, credit)
    start = time.monotonic()
    # Long enough for the router's margin before the client's own deadline to be at its longest.
    error = await _error(rig, timeout_s=2.0)
    assert time.monotonic() - start < 4.0
    assert isinstance(error, DeadlineExceeded)
    assert words in error.detail
    await eventually(lambda: len(decode.cancelled) == 1, 1.0)
    assert rig.router.queue.depth == 0


async def test_missing_keys_are_named_when_no_time_is_left_to_try_again(rig: Rig) -> None:
    async def incomplete(worker: FakeDecode, request: Any) -> Any:
        yield reserved(request)
        raise TransferTimeout("missing (0, 0, 3)")

    decode = await rig.add_decode(incomplete)
    await rig.add_prefill(stall)
    error = await _error(rig, timeout_s=1.0)
    assert isinstance(error, TransferTimeout)
    assert "missing (0, 0, 3)" in error.detail
    assert len(decode.requests) == 1
    assert isinstance(await _error(rig, timeout_s=10.0), TransferTimeout)
    assert len(decode.requests) > 2


async def test_a_silent_decode_worker_is_named_when_the_deadline_passes(rig: Rig) -> None:
    async def silent(worker: FakeDecode, request: Any) -> Any:
        await asyncio.sleep(60)
        yield

    await rig.add_decode(silent)
    error = await _error(rig, timeout_s=2.0)
    assert "a reservation on decode worker d0" in error.detail


@pytest.mark.parametrize("credit", [0, 4])
async def test_a_client_that_leaves_ends_everything_within_a_second(rig: Rig, credit: int) -> None:
    decode = await rig.add_decode(hang)
    prefill = await rig.add_prefill(stall, credit)
    call = rig.stub.Generate(inference_pb2.GenerateRequest(text="a prompt"), timeout=30)
    reading = asyncio.create_task(call.read())
    await eventually(lambda: bool(prefill.tasks) if credit else rig.router.queue.depth == 1)
    call.cancel()
    start = time.monotonic()
    await eventually(lambda: len(decode.cancelled) == 1)
    await eventually(lambda: len(prefill.cancels) == (1 if credit else 0))
    await eventually(lambda: rig.router.queue.depth == 0)
    assert time.monotonic() - start < 1
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_stop_text_ends_decode_and_is_left_out(rig: Rig) -> None:
    async def talkative(worker: FakeDecode, request: Any) -> Any:
        yield reserved(request)
        for letter in "one two" + "x" * 1_000:
            yield tokens(letter)
            await asyncio.sleep(0.002)

    decode = await rig.add_decode(talkative)
    responses = await rig.ask(sampling=sampling_pb2.SamplingParams(stop=[" two"]))
    assert text_of(responses) == "one"
    assert responses[-1].finish_reason == sampling_pb2.FINISH_REASON_STOP
    assert responses[-1].usage.completion_tokens == 7
    assert not decode.requests[0].sampling.stop
    await eventually(lambda: len(decode.cancelled) == 1, 1.0)


async def test_load_spreads_over_workers_by_what_was_promised(rig: Rig) -> None:
    first, second = await rig.add_decode(hang), await rig.add_decode(hang)
    calls = [rig.stub.Generate(inference_pb2.GenerateRequest(text="x"), timeout=30) for _ in "1234"]
    readers = [asyncio.create_task(call.read()) for call in calls]
    await eventually(lambda: len(first.requests) + len(second.requests) == 4)
    assert len(first.requests) == len(second.requests) == 2
    for call in calls:
        call.cancel()
    await asyncio.gather(*readers, return_exceptions=True)


async def test_requests_beyond_the_bound_are_refused() -> None:
    rig = await Rig(max_concurrent_requests=1).start()
    try:
        decode = await rig.add_decode(hang)
        call = rig.stub.Generate(inference_pb2.GenerateRequest(text="x"), timeout=30)
        reading = asyncio.create_task(call.read())
        await eventually(lambda: len(decode.requests) == 1)
        error = await _error(rig)
        assert isinstance(error, QueueFull)
        assert error.retry_after_s
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        decode.script = say("ok")
        await eventually(lambda: len(decode.cancelled) == 1)
        assert text_of(await rig.ask()) == "ok"
    finally:
        await rig.close()


async def test_a_full_prefill_queue_refuses_what_must_be_remote_and_nothing_else() -> None:
    rig = await Rig(max_queued_tasks=1).start()
    try:
        decode = await rig.add_decode(hang)
        await rig.add_prefill(stall, credit=0)
        call = rig.stub.Generate(inference_pb2.GenerateRequest(text="xx"), timeout=30)
        reading = asyncio.create_task(call.read())
        await eventually(lambda: rig.router.queue.depth == 1)
        remote = inference_pb2.PREFILL_PLACEMENT_REMOTE
        assert isinstance(await _error(rig, prefill_placement=remote), QueueFull)
        await eventually(lambda: len(decode.cancelled) == 1, 1.0)
        decode.script = say("ok")
        assert text_of(await rig.ask()) == "ok"
        assert [request.remote_prefill for request in decode.requests] == [True, True, False]
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    finally:
        await rig.close()


async def test_a_draining_router_takes_nothing_new(rig: Rig) -> None:
    await rig.add_decode(say("ok"))
    rig.router.inference.drain()
    assert isinstance(await _error(rig), Draining)


async def test_a_worker_that_leaves_the_registry_may_end_its_answers(rig: Rig) -> None:
    async def slow(worker: FakeDecode, request: Any) -> Any:
        yield reserved(request)
        yield tokens("a")
        await asyncio.sleep(0.3)
        yield tokens("b")
        yield finished(request)

    decode = await rig.add_decode(slow)
    asking = asyncio.create_task(rig.ask())
    await eventually(lambda: len(decode.requests) == 1)
    rig.router.workers.update([])
    assert text_of(await asking) == "ab"
    assert isinstance(await _error(rig), NoDecodeWorker)


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
