"""The answer between the decode worker and the client."""

from __future__ import annotations

import asyncio

import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.errors import WorkerGone
from headrace_router.request import response_stream as answer_module
from headrace_router.request.response_stream import ResponseStream
from headrace_router.request.validation import prepare
from headrace_text.byte_codec import ByteCodec

_STOP = sampling_pb2.FINISH_REASON_STOP
_LENGTH = sampling_pb2.FINISH_REASON_LENGTH


def _answer(*stops: str, stop_token_ids: tuple[int, ...] = ()) -> ResponseStream:
    request = inference_pb2.GenerateRequest(
        text="prompt",
        sampling=sampling_pb2.SamplingParams(stop=stops, stop_token_ids=stop_token_ids),
    )
    prepared = prepare(
        request, request_id="r1", codecs={"sim": ByteCodec()}, max_model_len={"sim": 4_096}
    )
    return ResponseStream(prepared, "trace")


def _tokens(text: str) -> decode_pb2.Tokens:
    return decode_pb2.Tokens(
        token_ids=text.encode(),
        logprobs=[sampling_pb2.TokenLogprobs(logprob=-1.0) for _ in text.encode()],
    )


def _finish(answer: ResponseStream, reason: sampling_pb2.FinishReason.ValueType = _LENGTH) -> None:
    answer.finish(reason, inference_pb2.Usage(), inference_pb2.Timing())


async def _rest(answer: ResponseStream) -> list[inference_pb2.GenerateResponse]:
    responses: list[inference_pb2.GenerateResponse] = []
    while (response := await answer.next_message()) is not None:
        responses.append(response)
    return responses


def _stopped(answer: ResponseStream) -> bool:
    return answer.stopped


async def test_the_first_token_is_there_at_once_and_the_rest_shares_a_message() -> None:
    answer = _answer()
    await answer.add_tokens(_tokens("a"))
    first = await answer.next_message()
    assert first is not None
    assert (first.text, first.trace_id, first.request_id) == ("a", "trace", "r1")
    await answer.add_tokens(_tokens("b"))
    await answer.add_tokens(_tokens("cd"))
    _finish(answer)
    (last,) = await _rest(answer)
    assert (last.text, list(last.token_ids), len(last.logprobs)) == ("bcd", [98, 99, 100], 3)
    assert last.finish_reason == _LENGTH
    assert last.trace_id == ""
    assert answer.completion_tokens == 4


async def test_an_answer_of_nothing_still_has_a_last_message() -> None:
    answer = _answer()
    _finish(answer)
    (only,) = await _rest(answer)
    assert only.trace_id == "trace"
    assert only.finish_reason == _LENGTH


async def test_a_stop_text_over_token_borders_is_cut_and_counted() -> None:
    answer = _answer("END")
    await answer.add_tokens(_tokens("xE"))
    assert not _stopped(answer)
    await answer.add_tokens(_tokens("NDyy"))
    assert _stopped(answer)
    _finish(answer)
    responses = await _rest(answer)
    assert "".join(response.text for response in responses) == "x"
    assert answer.completion_tokens == 4
    assert responses[-1].finish_reason == _STOP


async def test_held_back_text_comes_with_the_end() -> None:
    answer = _answer("END")
    await answer.add_tokens(_tokens("xEN"))
    _finish(answer)
    assert "".join(response.text for response in await _rest(answer)) == "xEN"


async def test_a_stop_token_has_no_text() -> None:
    answer = _answer(stop_token_ids=(ord("!"),))
    await answer.add_tokens(_tokens("a!"))
    _finish(answer, _STOP)
    responses = await _rest(answer)
    assert "".join(response.text for response in responses) == "a"
    assert answer.completion_tokens == 2


async def test_an_error_comes_after_what_was_said() -> None:
    answer = _answer()
    await answer.add_tokens(_tokens("a"))
    answer.fail(WorkerGone("away"))
    first = await answer.next_message()
    assert first is not None
    assert first.text == "a"
    with pytest.raises(WorkerGone):
        await answer.next_message()


async def test_a_slow_client_holds_the_decode_worker_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_module, "PENDING_TOKENS_MAX", 4)
    answer = _answer()
    adding = asyncio.create_task(answer.add_tokens(_tokens("abcde")))
    await asyncio.sleep(0.01)
    assert not adding.done()
    response = await answer.next_message()
    assert response is not None
    assert response.text == "abcde"
    async with asyncio.timeout(1):
        await adding
