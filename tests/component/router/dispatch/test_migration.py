"""A decode worker goes, and the answer goes on: same tokens, same text, none twice and none missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import (
    first_token_pb2,
    inference_pb2,
    sampling_pb2,
    trace_pb2,
    trace_pb2_grpc,
)
from headrace_common.errors import (
    DeadlineExceeded,
    DecodeFull,
    Draining,
    InternalError,
    StaleIncarnation,
    TransferFailed,
    WorkerGone,
)
from headrace_common.rpc.status import error_from_rpc
from headrace_common.telemetry import schema
from tests.component.router.fakes import (
    FakeDecode,
    Rig,
    begin_answer,
    eventually,
    full,
    go_on,
    hand_over,
    reserved,
    text_of,
)

ANSWER = "Grüße aus dem Süden, und gute Nacht."
LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL


def recite(letters: int, then: Any = None, answer: str = ANSWER) -> Any:
    """Goes on with the answer wherever it is, by at most so many bytes; then it ends, or `then` happens."""

    async def script(
        worker: FakeDecode, request: decode_pb2.GenerateRequest
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        done = request.generated_token_count
        whole = answer.encode()[: request.sampling.max_tokens]
        yield reserved(request)
        if request.remote_prefill:
            await worker.handoff.of(request.transfer_id).wait()
        for byte in whole[done : done + letters]:
            yield decode_pb2.GenerateResponse(
                tokens=decode_pb2.Tokens(
                    token_ids=[byte],
                    logprobs=[sampling_pb2.TokenLogprobs(logprob=-byte)]
                    if request.sampling.logprobs
                    else [],
                )
            )
        if then is not None:
            await asyncio.sleep(0.1)
            await then(worker)
        else:
            yield decode_pb2.GenerateResponse(
                finished=decode_pb2.Finished(
                    reason=sampling_pb2.FINISH_REASON_LENGTH, cached_tokens=done + 3
                )
            )

    return script


async def die(worker: FakeDecode) -> None:
    worker.background.append(asyncio.create_task(worker.kill()))
    await asyncio.sleep(60)


def give_up(error: Exception) -> Any:
    async def then(worker: FakeDecode) -> None:
        raise error

    return then


def params(**fields: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(max_tokens=len(ANSWER.encode()), **fields)


async def error_of(rig: Rig, **fields: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.ask(**fields)
    return error_from_rpc(caught.value)


def asked(rig: Rig) -> list[decode_pb2.GenerateRequest]:
    """What decode workers were asked, in the order of what was generated before."""
    requests = [request for decode in rig.decodes for request in decode.requests]
    return sorted(requests, key=lambda request: request.generated_token_count)


# One more byte of these is one within a character.
@pytest.mark.parametrize("letters", [1, 2, 3, 4, 19])
async def test_the_answer_goes_on_at_another_worker(rig: Rig, letters: int) -> None:
    for _ in range(2):
        await rig.add_decode(recite(letters, die))
    await rig.add_decode(recite(99))
    rig.decodes[2].running_requests = 7
    await rig.loads_known()
    responses = await rig.ask(sampling=params(logprobs=1, seed=7))
    assert text_of(responses) == ANSWER
    spoken = [token for response in responses for token in response.token_ids]
    assert bytes(spoken) == ANSWER.encode()
    assert [-entry.logprob for r in responses for entry in r.logprobs] == spoken
    last = responses[-1]
    assert last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    assert last.usage.completion_tokens == len(ANSWER.encode())
    assert last.timing.attempts == 3
    assert last.timing.decode_worker_id == "d2"
    requests = asked(rig)
    assert [request.generated_token_count for request in requests] == [0, letters, 2 * letters]
    for request in requests:
        done = ANSWER.encode()[: request.generated_token_count]
        assert bytes(request.token_ids) == b"a prompt" + done
        assert request.sampling == requests[0].sampling
    assert len({request.transfer_id for request in requests}) == 3


async def test_a_stop_text_is_found_across_the_seam(rig: Rig) -> None:
    # "S", and the first byte of the next letter.
    await rig.add_decode(recite(ANSWER.encode().index(b"S") + 2, die))
    await rig.add_decode(recite(99))
    rig.decodes[1].running_requests = 7
    await rig.loads_known()
    responses = await rig.ask(sampling=params(stop=["Süden"]))
    assert text_of(responses) == "Grüße aus dem "
    assert responses[-1].finish_reason == sampling_pb2.FINISH_REASON_STOP
    assert responses[-1].timing.attempts == 2


async def test_prompt_and_answer_so_far_are_prefilled_by_the_usual_policy(rig: Rig) -> None:
    for _ in range(2):
        await rig.add_decode(recite(20, die))
    await rig.add_decode(recite(99))
    rig.decodes[2].running_requests = 7
    prefill = await rig.add_prefill(hand_over)
    await rig.loads_known()
    responses = await rig.ask(sampling=params())
    assert text_of(responses) == ANSWER
    for request in asked(rig):
        task = next(t for t in prefill.tasks if t.transfer_id == request.transfer_id)
        assert list(task.token_ids) == list(request.token_ids)[:-1]
    # Tokens of the answer are no prompt.
    assert responses[-1].usage.prompt_tokens == len("a prompt")
    assert responses[-1].usage.decode_cached_tokens <= len("a prompt")


async def test_an_answer_begun_by_prefill_goes_on_too(rig: Rig) -> None:
    async def first_then_die(worker: FakeDecode, request: Any) -> Any:
        async for event in go_on("ar")(worker, request):
            if event.HasField("finished"):
                await asyncio.sleep(0.1)
                await die(worker)
            yield event

    await rig.add_decode(first_then_die)
    await rig.add_decode(recite(99, answer="Paris"))
    rig.decodes[1].running_requests = 7
    await rig.add_prefill(begin_or_hand_over)
    await rig.loads_known()
    responses = await rig.ask(
        first_token=first_token_pb2.FIRST_TOKEN_POLICY_PREFILL,
        sampling=sampling_pb2.SamplingParams(max_tokens=5),
    )
    assert text_of(responses) == "Paris"
    assert responses[-1].usage.completion_tokens == 5


async def begin_or_hand_over(worker: Any, task: Any) -> None:
    await (begin_answer("P") if task.HasField("sampling") else hand_over)(worker, task)


@pytest.mark.parametrize("by", ["length", "stop token"])
async def test_what_had_nothing_left_to_say_ends_where_it_was(rig: Rig, by: str) -> None:
    """The last token comes, and the worker dies before it says that it was the last."""
    await rig.add_decode(recite(4, die))
    spare = await rig.add_decode(recite(99))
    spare.running_requests = 7
    await rig.loads_known()
    if by == "length":
        sampling = sampling_pb2.SamplingParams(max_tokens=4)
        reason = sampling_pb2.FINISH_REASON_LENGTH
    else:
        sampling = params(stop_token_ids=[ANSWER.encode()[3]])
        reason = sampling_pb2.FINISH_REASON_STOP
    responses = await rig.ask(sampling=sampling)
    assert responses[-1].finish_reason == reason
    assert responses[-1].usage.completion_tokens == 4
    assert responses[-1].timing.attempts == 1
    assert not spare.requests


@pytest.mark.parametrize(
    "error",
    [
        Draining("shutting down"),
        WorkerGone("going"),
        StaleIncarnation("another one is here"),
        TransferFailed("as scripted"),
    ],
    ids=lambda error: error.reason,
)
async def test_a_worker_that_ends_the_stream_by_itself_is_left(rig: Rig, error: Exception) -> None:
    leaving = await rig.add_decode(recite(9, give_up(error)))
    await rig.add_decode(recite(99))
    rig.decodes[1].running_requests = 7
    await rig.loads_known()
    responses = await rig.ask(sampling=params())
    assert text_of(responses) == ANSWER
    assert responses[-1].timing.attempts == 2
    assert len(leaving.requests) == 1


async def test_a_bug_in_a_worker_is_not_spread_to_others(rig: Rig) -> None:
    await rig.add_decode(recite(9, give_up(InternalError("as scripted"))))
    await rig.add_decode(recite(99))
    rig.decodes[1].running_requests = 7
    await rig.loads_known()
    assert isinstance(await error_of(rig, sampling=params()), InternalError)
    assert not rig.decodes[1].requests


async def test_the_retry_budget_bounds_migrations(rig: Rig) -> None:
    rig.policy.policy.retry_budget = 1
    for _ in range(4):
        await rig.add_decode(recite(2, die))
    error = await error_of(rig, sampling=params())
    assert isinstance(error, WorkerGone)
    assert [request.generated_token_count for request in asked(rig)] == [0, 2]


async def test_refusals_cost_a_begun_answer_no_attempt(rig: Rig) -> None:
    """Three that are full, or leaving, are passed over though only one retry is allowed."""
    rig.policy.policy.retry_budget = 1

    async def leaving(worker: FakeDecode, request: Any) -> Any:
        raise Draining("shutting down")
        yield  # type: ignore[unreachable]

    await rig.add_decode(recite(2, die))
    for script in (full, leaving, full):
        (await rig.add_decode(script)).running_requests = 3
    (await rig.add_decode(recite(99))).running_requests = 7
    await rig.loads_known()
    responses = await rig.ask(sampling=params())
    assert text_of(responses) == ANSWER
    assert responses[-1].timing.attempts == 5


async def test_a_begun_answer_waits_for_room_until_its_deadline(rig: Rig) -> None:
    crowded = await rig.add_decode(recite(2, give_up(Draining("shutting down"))))
    other = await rig.add_decode(full)
    other.running_requests = 7
    await rig.loads_known()
    asking = asyncio.create_task(rig.ask(sampling=params()))
    await eventually(lambda: len(other.requests) >= 2)
    other.script = recite(99)
    assert text_of(await asking) == ANSWER
    assert len(crowded.requests) == 1
    other.script = full
    crowded.script = recite(2, give_up(Draining("shutting down")))
    error = await error_of(rig, sampling=params(), timeout_s=2.0)
    assert isinstance(error, DecodeFull | DeadlineExceeded | Draining)


async def test_a_begun_answer_waits_for_the_next_incarnation(rig: Rig) -> None:
    """Nobody else is there, and those that are dead are not asked meanwhile."""
    rig.policy.policy.retry_budget = 1
    dead = await rig.add_decode(recite(2, die))
    asking = asyncio.create_task(rig.ask(sampling=params()))
    await eventually(lambda: not rig.router.workers.table("sim").reachable.any())
    await asyncio.sleep(1.0)
    assert not asking.done()
    rig.decodes.remove(dead)
    await rig.add_decode(recite(99))
    responses = await asking
    assert text_of(responses) == ANSWER
    assert responses[-1].timing.attempts == 2


async def test_waiting_for_a_worker_has_its_bound(rig: Rig) -> None:
    rig.router.inference._dispatcher._migration_wait_s = 0.5
    await rig.add_decode(recite(2, die))
    error = await error_of(rig, sampling=params())
    assert isinstance(error, WorkerGone)
    assert "decode worker d0" in error.detail


async def test_a_dead_worker_costs_one_attempt_in_all(rig: Rig) -> None:
    """Passive health: the registry still names it, and nobody else tries it."""
    dead, alive = await rig.add_decode(recite(99)), await rig.add_decode(recite(99))
    alive.running_requests = 7
    await rig.loads_known()
    await dead.kill()
    attempts = []
    for _ in range(12):
        responses = await rig.ask(sampling=params())
        assert text_of(responses) == ANSWER
        attempts.append(responses[-1].timing.attempts)
    assert sum(attempts) <= len(attempts) + 1


async def test_a_worker_in_doubt_is_chosen_again_once_it_reports(rig: Rig) -> None:
    first, second = await rig.add_decode(recite(99)), await rig.add_decode(recite(99))
    second.running_requests = 7
    await rig.loads_known()
    table = rig.router.workers.table("sim")
    ref = next(w.ref for w in table.workers if w.ref.worker_id == "d0")
    first.reports.clear()
    # For what it has said already to be heard.
    await asyncio.sleep(0.5)
    rig.router.workers.mark_unreachable(ref)
    assert not table.reachable.all()
    await rig.ask(sampling=params())
    assert (len(first.requests), len(second.requests)) == (0, 1)
    first.reports.set()
    await eventually(lambda: bool(table.reachable.all()))
    await rig.ask(sampling=params())
    assert len(first.requests) == 1


async def test_the_trace_has_a_span_for_each_attempt(rig: Rig) -> None:
    await rig.add_decode(recite(9, die))
    await rig.add_decode(recite(99))
    rig.decodes[1].running_requests = 7
    await rig.loads_known()
    responses = await rig.ask(sampling=params())
    stub: Any = trace_pb2_grpc.TraceServiceStub(rig.channel)
    attempts: list[trace_pb2.Span] = []
    async with asyncio.timeout(5):
        while len(attempts) < 2:
            await asyncio.sleep(0.02)
            trace = (await stub.GetTrace(trace_pb2.GetTraceRequest(id=responses[0].trace_id))).trace
            attempts = [span for span in trace.spans if span.name == schema.SPAN_ATTEMPT]
    attempts.sort(key=lambda span: int(span.attributes[schema.ATTRIBUTE_ATTEMPT]))
    assert [span.attributes[schema.ATTRIBUTE_GENERATED_TOKENS] for span in attempts] == ["0", "9"]
    assert attempts[0].attributes[schema.ATTRIBUTE_ERROR_REASON] == WorkerGone.reason
    assert schema.ATTRIBUTE_ERROR_REASON not in attempts[1].attributes


# Clients that bring tokens along.


@pytest.mark.parametrize("done", [0, 1, 2, 3, 17, len(ANSWER.encode())])
@pytest.mark.parametrize("stops", [(), ("Süden",)])
async def test_a_client_goes_on_after_what_it_has(
    rig: Rig, done: int, stops: tuple[str, ...]
) -> None:
    decode = await rig.add_decode(recite(99))
    ids = list(ANSWER.encode())
    whole = await rig.ask(sampling=params(stop=stops))
    rest = await rig.ask(
        sampling=params(stop=stops), generated=inference_pb2.TokenIds(ids=ids[:done])
    )
    spoken = [token for response in rest for token in response.token_ids]
    assert rest[-1].finish_reason == whole[-1].finish_reason
    if done > whole[-1].usage.completion_tokens:
        assert not spoken
        return
    assert rest[-1].usage.completion_tokens == whole[-1].usage.completion_tokens
    assert spoken == ids[done : whole[-1].usage.completion_tokens]
    # What of the text the tokens before had completed is not said again.
    assert text_of(whole).endswith(text_of(rest))
    prior = bytes(ids[:done]).decode(errors="ignore")
    assert text_of(rest) in (text_of(whole)[len(prior) :], text_of(whole))
    assert len(decode.requests) == (2 if spoken else 1)


async def test_more_tokens_than_may_be_generated_are_refused(rig: Rig) -> None:
    await rig.add_decode(recite(99))
    too_many = inference_pb2.TokenIds(ids=[65] * 4)
    error = await error_of(
        rig, sampling=sampling_pb2.SamplingParams(max_tokens=3), generated=too_many
    )
    assert set(error.violations) == {"generated.ids"}
    error = await error_of(rig, generated=inference_pb2.TokenIds(ids=[10**6]))
    assert set(error.violations) == {"generated.ids[0]"}
