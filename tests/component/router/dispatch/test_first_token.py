"""First tokens from prefill workers or from their hidden states, through a real router to scripted workers."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import first_token_pb2, inference_pb2, sampling_pb2
from headrace_common.errors import TransferFailed
from headrace_common.telemetry import schema
from tests.kit.router import Rig, text_of
from tests.kit.workers import (
    FakeDecode,
    FakePrefill,
    fail,
    finished,
    hand_over,
    reply,
    reserved,
    send_first_token,
    stall,
    tokens,
)
from tests.waiting import forever, until

PREFILL = first_token_pb2.FIRST_TOKEN_POLICY_PREFILL
DECODE = first_token_pb2.FIRST_TOKEN_POLICY_DECODE
HIDDEN = first_token_pb2.FIRST_TOKEN_POLICY_HIDDEN


def sampling(count: int, **fields: Any) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(max_tokens=count, seed=7, **fields)


def from_hidden_state(text: str) -> Any:
    """Sends the first letter at once, and the others after the KV cache."""

    async def script(worker: FakeDecode, request: Any) -> Any:
        yield reserved(request)
        yield tokens(text[0])
        await worker.handoff.of(request.transfer_id).wait()
        yield tokens(text[1:])
        yield finished(request)

    return script


@pytest.mark.parametrize(
    ("policy", "decode_script", "prefill_script"),
    [
        (PREFILL, reply("aris", after_first_token=True), send_first_token("P", stall)),
        (HIDDEN, from_hidden_state("Paris"), stall),
    ],
    ids=["prefill", "hidden"],
)
async def test_the_first_token_is_sent_before_the_transfer_is_complete(
    rig: Rig, policy: Any, decode_script: Any, prefill_script: Any
) -> None:
    decode = await rig.add_decode(decode_script)
    prefill = await rig.add_prefill(prefill_script)
    request = inference_pb2.GenerateRequest(
        text="capital?", first_token=policy, sampling=sampling(9, logprobs=1)
    )
    stream = aiter(rig.stub.Generate(request, timeout=10))
    first = await anext(stream)
    assert first.text == "P"
    await until(lambda: bool(prefill.tasks))
    (task,), (received,) = prefill.tasks, decode.requests
    assert bytes(task.token_ids) == bytes(received.token_ids) == b"capital?"
    assert received.first_token == policy
    assert task.send_hidden_state is (policy == HIDDEN)
    if policy == PREFILL:
        assert task.sampling == received.sampling
        await until(lambda: bool(decode.first_tokens))
        assert decode.first_tokens == [
            decode_pb2.SetFirstTokenRequest(
                transfer_id=received.transfer_id,
                token_id=ord("P"),
                incarnation=decode.member.incarnation,
            )
        ]
    else:
        assert not task.HasField("sampling")
    await hand_over(prefill, task)
    responses = [first, *[response async for response in stream]]
    assert text_of(responses) == "Paris"
    assert responses[-1].usage.completion_tokens == 5
    assert responses[-1].timing.attempts == 1


@pytest.mark.parametrize(
    ("params", "reason", "text"),
    [
        (sampling(1), sampling_pb2.FINISH_REASON_LENGTH, "P"),
        (sampling(9, stop_token_ids=[ord("P")]), sampling_pb2.FINISH_REASON_STOP, ""),
        (sampling(9, stop=["P"]), sampling_pb2.FINISH_REASON_STOP, ""),
    ],
    ids=["max_tokens", "stop token", "stop text"],
)
async def test_a_first_token_that_ends_the_response_ends_all_work(
    rig: Rig, params: sampling_pb2.SamplingParams, reason: int, text: str
) -> None:
    decode = await rig.add_decode(reply("never", after_first_token=True))
    prefill = await rig.add_prefill(send_first_token("P", stall))
    responses = await rig.ask(first_token=PREFILL, sampling=params)
    assert text_of(responses) == text
    assert responses[-1].finish_reason == reason
    assert responses[-1].usage.completion_tokens == 1
    (task,) = prefill.tasks
    await until(lambda: prefill.cancels == [task.transfer_id])
    await until(lambda: decode.cancelled == {task.transfer_id})
    assert not decode.first_tokens


async def break_decode(worker: FakeDecode, request: Any) -> Any:
    if request.first_token == PREFILL:
        yield reserved(request)
        await worker.first_token_set.wait()
        await worker.die()
    elif request.first_token == HIDDEN:
        yield reserved(request)
        earlier = worker.read_tokens.count
        yield tokens("P")
        await worker.read_tokens.reach(earlier + 1)
        worker.handoff.of("P read").set()
        await forever()
    async for event in reply("aris")(worker, request):
        yield event


async def fail_after_token_from_hidden_state(worker: FakePrefill, task: Any) -> None:
    await worker.handoff.of("P read").wait()
    await fail(TransferFailed.reason)(worker, task)


# A token from a hidden state does not prove that the transfer succeeds, so the router still watches the prefill worker.
@pytest.mark.parametrize(
    ("policy", "behaviour"),
    [
        (PREFILL, send_first_token("P", fail(TransferFailed.reason))),
        (PREFILL, send_first_token("P", stall)),
        (HIDDEN, fail_after_token_from_hidden_state),
    ],
    ids=["transfer", "decode", "transfer after hidden"],
)
async def test_another_attempt_continues_after_the_first_token(
    rig: Rig, policy: Any, behaviour: Any
) -> None:
    async def prefill(worker: FakePrefill, task: Any) -> None:
        makes_token = task.HasField("sampling") or task.send_hidden_state
        await (behaviour if makes_token else hand_over)(worker, task)

    for _ in range(2):
        await rig.add_decode(break_decode)
        await rig.add_prefill(prefill)
    responses = await rig.ask("capital?", first_token=policy)
    assert text_of(responses) == "Paris"
    last = responses[-1]
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (8, 5)
    assert last.timing.attempts == 2
    requests = [request for decode in rig.decodes for request in decode.requests]
    first, second = sorted(requests, key=lambda request: request.generated_token_count)
    assert (first.first_token, second.first_token) == (policy, 0)
    assert bytes(second.token_ids) == b"capital?P"
    assert second.generated_token_count == 1
    assert first.transfer_id != second.transfer_id
    tasks = [task for prefill in rig.prefills for task in prefill.tasks]
    assert tasks
    for task in tasks:
        assert bytes(task.token_ids) == b"capital?"
        has_sampling = policy == PREFILL and task.transfer_id == first.transfer_id
        assert task.HasField("sampling") is has_sampling


async def first_remote_then_local(worker: FakeDecode, request: Any) -> Any:
    script = reply("never", after_first_token=True) if request.first_token else reply("local")
    async for event in script(worker, request):
        yield event


async def test_a_prefill_worker_that_sends_no_first_token_fails_the_attempt(rig: Rig) -> None:
    await rig.add_decode(first_remote_then_local)
    await rig.add_prefill(hand_over)
    responses = await rig.ask(first_token=PREFILL)
    assert text_of(responses) == "local"
    assert responses[-1].timing.attempts > 1


async def test_a_first_token_beyond_the_vocabulary_fails_the_attempt(rig: Rig) -> None:
    decode = await rig.add_decode(first_remote_then_local)
    await rig.add_prefill(send_first_token(32_000, stall))
    responses = await rig.ask(first_token=PREFILL)
    assert text_of(responses) == "local"
    assert not decode.first_tokens
    trace = await rig.trace_of(responses[0].trace_id)
    assert any("prefill worker p0" in str(span) for span in trace.spans)


async def test_the_trace_shows_that_the_second_token_waited_for_the_transfer(rig: Rig) -> None:
    await rig.add_decode(reply("aris", after_first_token=True))
    await rig.add_prefill(send_first_token("P"))
    responses = await rig.ask(first_token=PREFILL)
    trace_id = responses[0].trace_id
    # The prefill worker's report may come after the end of the answer.
    await until(lambda: len(rig.router.traces.get(trace_id).spans) > 0)
    trace = await rig.trace_of(trace_id)
    spans = {span.name: span for span in trace.spans}
    assert spans[schema.SPAN_REQUEST].attributes[schema.ATTRIBUTE_FIRST_TOKEN] == "prefill"
    assert spans[schema.SPAN_SECOND_TOKEN].duration.ToNanoseconds() > 0
