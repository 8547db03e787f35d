"""The response stream between the decode worker and the client."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.errors import ProtocolViolation, WorkerGone
from headrace_common.process.pacing import LoopLoad
from headrace_frontend.request.response_stream import ResponseStream
from headrace_kv.layout import WorkerRef
from tests.kit.requests import prepared

_STOP = sampling_pb2.FINISH_REASON_STOP
_LENGTH = sampling_pb2.FINISH_REASON_LENGTH
GAP_S = 0.2
"""Only a machine that stands still takes longer from one statement of a test to the next."""


def _response(*stops: str, load: LoopLoad | None = None, **sampling: Any) -> ResponseStream:
    request = inference_pb2.GenerateRequest(
        text="prompt", sampling=sampling_pb2.SamplingParams(stop=stops, **sampling)
    )
    return ResponseStream(prepared(request), "trace", load)


def _tokens(text: str) -> decode_pb2.Tokens:
    return decode_pb2.Tokens(
        token_ids=text.encode(),
        logprobs=[sampling_pb2.TokenLogprobs(logprob=-1.0) for _ in text.encode()],
    )


def _add(stream: ResponseStream, tokens: decode_pb2.Tokens) -> bool:
    """As an attempt does."""
    return stream.add_tokens(tokens.token_ids, tokens.logprobs, tokens.prompt_logprobs)


def _finish(stream: ResponseStream, reason: sampling_pb2.FinishReason.ValueType = _LENGTH) -> None:
    stream.finish(reason, inference_pb2.Usage(), inference_pb2.Timing())


async def _rest(stream: ResponseStream) -> list[inference_pb2.GenerateResponse]:
    responses: list[inference_pb2.GenerateResponse] = []
    while (response := await stream.next_message()) is not None:
        responses.append(response)
    return responses


def _stopped(stream: ResponseStream) -> bool:
    return stream.stopped


async def test_the_first_token_is_sent_at_once_and_later_tokens_share_a_message() -> None:
    stream = _response()
    _add(stream, _tokens("a"))
    first = await stream.next_message()
    assert first is not None
    assert (first.text, first.trace_id, first.request_id) == ("a", "trace", "r1")
    _add(stream, _tokens("b"))
    _add(stream, _tokens("cd"))
    _finish(stream)
    (last,) = await _rest(stream)
    assert (last.text, list(last.token_ids), len(last.logprobs)) == ("bcd", [98, 99, 100], 3)
    assert last.finish_reason == _LENGTH
    assert last.trace_id == ""
    assert stream.completion_tokens == 4


async def test_an_empty_response_has_a_last_message() -> None:
    stream = _response()
    _finish(stream)
    (only,) = await _rest(stream)
    assert only.trace_id == "trace"
    assert only.finish_reason == _LENGTH


async def test_a_stop_string_across_tokens_is_cut_and_its_tokens_are_counted() -> None:
    stream, stopped = _response("END"), Mock()
    stream.attempt_started(WorkerRef("d", "1"), stopped, Mock())
    _add(stream, _tokens("xE"))
    assert not _stopped(stream)
    stopped.assert_not_called()
    _add(stream, _tokens("NDyy"))
    assert _stopped(stream)
    stopped.assert_called_once_with()
    _finish(stream)
    responses = await _rest(stream)
    assert "".join(response.text for response in responses) == "x"
    assert stream.completion_tokens == 4
    assert responses[-1].finish_reason == _STOP


async def test_a_stop_token_has_no_text() -> None:
    stream = _response(stop_token_ids=(ord("!"),))
    _add(stream, _tokens("a!"))
    _finish(stream, _STOP)
    responses = await _rest(stream)
    assert "".join(response.text for response in responses) == "a"
    assert stream.completion_tokens == 2


async def test_an_error_is_raised_after_the_tokens_before_it() -> None:
    stream = _response()
    _add(stream, _tokens("a"))
    stream.fail(WorkerGone("away"))
    first = await stream.next_message()
    assert first is not None
    assert first.text == "a"
    with pytest.raises(WorkerGone):
        await stream.next_message()


async def test_a_slow_client_leaves_no_room_until_it_has_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace_frontend.request.response_stream.PENDING_TOKENS_MAX", 4)
    stream, drained = _response(), Mock()
    stream.attempt_started(WorkerRef("d", "1"), Mock(side_effect=AssertionError), drained)
    assert _add(stream, _tokens("abcd"))
    assert not _add(stream, _tokens("e"))
    response = await stream.next_message()
    assert response is not None
    assert response.text == "abcde"
    drained.assert_called_once_with()
    assert _add(stream, _tokens("f"))
    await stream.next_message()
    drained.assert_called_once_with()


class _FixedLoad(LoopLoad):
    """A gap between messages that the test sets, and none at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gap_s = 0.0

    def update(self, now_s: float) -> None:
        pass


class _Sent:
    """An outlet that keeps what it gets, in its order. `takes_text`: whether text alone is enough."""

    def __init__(self, *, takes_text: bool = True) -> None:
        self.writable = True
        self.texts: list[str] = []
        self.messages: list[inference_pb2.GenerateResponse] = []
        self._takes_text = takes_text

    def write_message(self, message: inference_pb2.GenerateResponse) -> None:
        self.messages.append(message)

    def write_text(self, text: str) -> bool:
        taken = self._takes_text and self.writable
        if taken:
            self.texts.append(text)
        return taken


def _ids(text: str) -> decode_pb2.Tokens:
    return decode_pb2.Tokens(token_ids=text.encode())


async def test_an_outlet_gets_no_part_of_a_stop_string() -> None:
    stream, sent = _response("END", load=_FixedLoad()), _Sent()
    stream.use_outlet(sent, Mock(side_effect=AssertionError))
    for text in ("a", "bE", "NDx"):
        _add(stream, _ids(text))
    _finish(stream, _STOP)
    last = await stream.next_message()
    assert last is not None
    assert (last.text, last.finish_reason) == ("", _STOP)
    assert sent.texts == ["b"]
    assert [one.text for one in sent.messages] == ["a", ""]


@pytest.mark.parametrize("takes_text", [True, False])
async def test_a_token_without_text_is_dropped_only_where_text_is_enough(takes_text: bool) -> None:
    stream, sent = _response(load=_FixedLoad()), _Sent(takes_text=takes_text)
    stream.use_outlet(sent, Mock(side_effect=AssertionError))
    half, rest = "é".encode()[:1], "é".encode()[1:]
    for token_ids in (b"a", half, rest):
        _add(stream, decode_pb2.Tokens(token_ids=token_ids))
    later = [list(one.token_ids) for one in sent.messages][1:]
    assert (later, sent.texts) == (([], ["", "é"]) if takes_text else ([[half[0]], [rest[0]]], []))


async def test_a_client_that_takes_no_message_gets_all_later_ones_from_a_reader_in_order() -> None:
    stream, sent, need_reader = _response(load=_FixedLoad()), _Sent(), Mock()
    stream.use_outlet(sent, need_reader)
    _add(stream, _ids("a"))
    need_reader.assert_not_called()
    sent.writable = False
    _add(stream, _ids("b"))
    sent.writable = True
    _add(stream, _ids("c"))
    message = await stream.next_message()
    assert message is not None
    assert (message.text, sent.texts, [one.text for one in sent.messages]) == ("bc", [], ["a"])
    need_reader.assert_called_once_with()


async def test_an_outlet_that_fails_after_the_gap_fails_the_response() -> None:
    load = _FixedLoad()
    stream = _response(load=load)

    class Broken(_Sent):
        def write_text(self, text: str) -> bool:
            raise ValueError("a bug")

    needed = asyncio.Event()
    stream.use_outlet(Broken(), needed.set)
    load.gap_s = GAP_S
    _add(stream, _ids("a"))
    _add(stream, _ids("b"))
    async with asyncio.timeout(10):
        await needed.wait()
        with pytest.raises(ValueError, match="a bug"):
            await _rest(stream)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, "x"), (2, "x"), (3, "xENDyENDz"), (4, "xENDyENDz"), (7, "xENDyENDz"), (8, "xENDyENDz")],
)
async def test_a_stop_string_ends_no_answer_before_its_least_length(
    min_tokens: int, text: str, together: bool
) -> None:
    stream = _response("EN", min_tokens=min_tokens)
    for piece in ["xENDyENDz"] if together else "xENDyENDz":
        _add(stream, _tokens(piece))
    expected = {0: "x", 2: "x", 3: "xENDy", 4: "xENDy"}.get(min_tokens, text)
    _finish(stream)
    assert "".join(response.text for response in await _rest(stream)) == expected


async def test_the_text_of_a_stop_token_may_be_kept() -> None:
    for kept, text in ((False, "x"), (True, "xE")):
        stream = _response(stop_token_ids=[ord("E")], include_stop_str_in_output=kept)
        _add(stream, _tokens("xE"))
        _finish(stream, _STOP)
        assert "".join(response.text for response in await _rest(stream)) == text


def _scored(text: str, prompt_tokens: int) -> decode_pb2.Tokens:
    entries = [sampling_pb2.TokenLogprobs(logprob=-n) for n in range(1, prompt_tokens)]
    return decode_pb2.Tokens(token_ids=text.encode(), prompt_logprobs=entries)


def _check_parts(messages: list[inference_pb2.GenerateResponse], tokens: int) -> None:
    """Of the prompt that `_long` has: in order, in bounded parts, and before the answer."""
    parts = messages[:-1]
    assert [len(one.prompt_token_ids) for one in parts] == [1_024, 1_024, tokens - 2_048]
    ids = [token for one in parts for token in one.prompt_token_ids]
    assert bytes(ids) == b"x" * tokens
    logprobs = [entry.logprob for one in parts for entry in one.prompt_logprobs]
    assert logprobs == [-n for n in range(1, tokens)]
    assert [one.trace_id for one in messages] == ["trace", "", "", ""]
    assert (messages[-1].text, list(messages[-1].prompt_token_ids)) == ("a", [])


def _long(tokens: int, *, generated: bytes = b"") -> ResponseStream:
    request = inference_pb2.GenerateRequest(
        text="x" * tokens, sampling=sampling_pb2.SamplingParams(prompt_logprobs=1)
    )
    request.generated.ids.extend(generated)
    return ResponseStream(prepared(request), "trace")


async def test_the_logprobs_of_a_prompt_precede_the_answer_in_bounded_messages() -> None:
    stream = _long(2_500)
    _add(stream, _scored("a", 2_500))
    _finish(stream)
    _check_parts(await _rest(stream), 2_500)


async def test_a_reader_writes_the_logprobs_of_a_prompt_where_others_need_none() -> None:
    stream = _long(2_500)
    needed = asyncio.Event()
    stream.use_outlet(_Sent(), needed.set)
    _add(stream, _scored("a", 2_500))
    assert needed.is_set()
    _finish(stream)
    _check_parts(await _rest(stream), 2_500)


async def test_a_prompt_of_one_token_has_a_message_without_logprobs() -> None:
    stream = _long(1)
    _add(stream, _scored("a", 1))
    _finish(stream)
    first, last = await _rest(stream)
    assert (list(first.prompt_token_ids), list(first.prompt_logprobs)) == ([120], [])
    assert last.text == "a"


async def test_first_tokens_without_the_logprobs_of_the_prompt_are_an_error() -> None:
    stream = _long(3)
    # Those of another attempt too.
    for _ in range(2):
        with pytest.raises(ProtocolViolation, match="of 0 prompt tokens, not of 2"):
            _add(stream, _ids("a"))
    assert not stream.started


async def test_an_answer_that_continues_has_no_logprobs_of_the_prompt() -> None:
    stream = _long(3, generated=b"z")
    _add(stream, _ids("a"))
    _finish(stream)
    (last,) = await _rest(stream)
    assert (last.text, list(last.prompt_token_ids)) == ("a", [])
