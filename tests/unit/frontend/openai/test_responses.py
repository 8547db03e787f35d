"""OpenAI responses from gRPC messages."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.inference.v1 import inference_pb2, latency_pb2, sampling_pb2
from headrace_common import errors
from headrace_common.errors import HeadraceError, InvalidRequest, QueueFull
from headrace_common.http.exchange import HttpError
from headrace_frontend.openai.answers import AnswerRules
from headrace_frontend.openai.completion_format import CompletionFormat
from headrace_frontend.openai.errors import error_object, headers_of, status_of
from headrace_frontend.openai.requests import Includes
from headrace_frontend.openai.responses import (
    DONE_EVENT,
    ChatFormat,
    CollectedChoice,
    ResponseHead,
    usage_object,
)
from headrace_frontend.openai.tokens import PromptOffsets
from headrace_text.load import ByteCodec

HEAD = ResponseHead("chatcmpl-1", 1_700_000_000, 'the "model"')
# OpenAI's words.
CODES = {
    errors.Unauthenticated: "invalid_api_key",
    errors.DecodeFull: "rate_limit_exceeded",
    errors.QueueFull: "rate_limit_exceeded",
    errors.FirstTokenLate: "rate_limit_exceeded",
    errors.InternalError: "server_error",
}
LENGTH = sampling_pb2.FINISH_REASON_LENGTH


def message(text: str = "", **fields: Any) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(text=text, **fields)


def read(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    parsed: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return parsed


def logprobs(token_id: int, logprob: float) -> dict[str, Any]:
    other = sampling_pb2.TokenAlternative(token_id=98, logprob=-2.0)
    entry = sampling_pb2.TokenLogprobs(logprob=logprob, alternatives=[other])
    return {"token_ids": [token_id], "logprobs": [entry]}


@given(st.text(min_size=1), st.booleans(), st.booleans())
def test_the_event_of_a_text_is_that_of_its_message(text: str, chat: bool, usage: bool) -> None:
    kind = ChatFormat if chat else CompletionFormat
    form = kind(HEAD, ByteCodec(), includes=Includes(usage=usage))
    for index in (0, 3, 0):
        assert form.text_event(index, text) == form._whole_event(index, message(text))


def test_a_text_has_no_event_of_its_own_where_the_answer_is_divided() -> None:
    form = ChatFormat(HEAD, ByteCodec(), rules=AnswerRules(required=""))
    assert form.text_event(0, "a") is None


@given(st.text(), st.booleans())
def test_an_event_is_one_line_of_json_with_any_text(text: str, chat: bool) -> None:
    kind = ChatFormat if chat else CompletionFormat
    form = kind(HEAD, ByteCodec())
    event = read(form.event(3, message(text)))
    (choice,) = event["choices"]
    assert (event["id"], event["model"], choice["index"]) == (HEAD.id, HEAD.model, 3)
    assert choice["finish_reason"] is None
    if chat:
        assert choice["delta"] == ({"content": text} if text else {})
    else:
        assert choice["text"] == text


def test_usage_is_null_until_the_last_event() -> None:
    form = ChatFormat(HEAD, ByteCodec(), includes=Includes(usage=True))
    assert read(form.first_event(0))["usage"] is None
    assert read(form.event(0, message("a", finish_reason=LENGTH)))["usage"] is None
    usage = inference_pb2.Usage(
        prompt_tokens=5, completion_tokens=2, cached_tokens=3, stored_tokens=4
    )
    last = read(form.last_event([usage, usage], 1).removesuffix(DONE_EVENT))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert ChatFormat(HEAD, ByteCodec()).last_event([usage], 1) == DONE_EVENT


def test_each_prompt_counts_once() -> None:
    usages = [inference_pb2.Usage(prompt_tokens=n, completion_tokens=1) for n in (5, 5, 7, 7)]
    assert usage_object(usages, 2)["prompt_tokens"] == 12


def tops(kind: type[ChatFormat | CompletionFormat], sampled: int, *others: int) -> list[str]:
    """The most probable tokens of a token, in an event."""
    entry = sampling_pb2.TokenLogprobs(logprob=-3.0)
    for number, other in enumerate(others):
        entry.alternatives.add(token_id=other, logprob=-3.0 if other == sampled else -number)
    sent = message("x", token_ids=[sampled], logprobs=[entry])
    (choice,) = read(kind(HEAD, ByteCodec()).event(0, sent))["choices"]
    if kind is ChatFormat:
        return [one["token"] for one in choice["logprobs"]["content"][0]["top_logprobs"]]
    return list(choice["logprobs"]["top_logprobs"][0])


def test_the_sampled_token_is_among_the_most_probable_ones() -> None:
    assert tops(ChatFormat, 97, 97, 98) == ["a", "b"]
    assert tops(ChatFormat, 97, 98, 99) == ["b", "a"]
    assert tops(ChatFormat, 97, 98) == ["a"]
    assert tops(ChatFormat, 97) == []
    assert tops(CompletionFormat, 97, 97, 98) == ["a", "b"]
    assert tops(CompletionFormat, 97, 98, 99) == ["b", "c", "a"]
    assert tops(CompletionFormat, 97) == ["a"]
    # Both are parts of characters.
    assert tops(CompletionFormat, 0xE4, 0xE5) == ["\ufffd"]


def test_tokens_may_be_named_by_their_ids() -> None:
    form = ChatFormat(HEAD, ByteCodec(), includes=Includes(names_tokens_by_id=True))
    (token,) = form.tokens_of(message("a", **logprobs(97, -1.0)))
    assert (token["token"], token["bytes"]) == ("token_id:97", [97])


def test_logprobs_of_a_chat_have_text_and_bytes() -> None:
    form = ChatFormat(HEAD, ByteCodec())
    event = read(form.event(0, message("a", **logprobs(97, -math.inf))))
    (token,) = event["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("a", -9999.0, [97])
    assert token["top_logprobs"] == [{"token": "a", "logprob": -9999.0, "bytes": [97]}]


def test_a_token_that_is_part_of_a_character_has_no_bytes() -> None:
    form = ChatFormat(HEAD, ByteCodec())
    (token,) = form.tokens_of(message("", **logprobs(0xE4, -1.0)))
    assert token["bytes"] is None


@pytest.mark.parametrize("sizes", [(6,), (1, 1, 1, 1, 1, 1), (2, 4), (3, 3)])
def test_offsets_count_characters_of_the_text(sizes: tuple[int, ...]) -> None:
    """One event or several. The second character has three tokens, and the last token has no text."""
    tokens = list("a\u20acbc".encode())
    form, choice, offsets = CompletionFormat(HEAD, ByteCodec()), CollectedChoice(), []
    for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        ids = tokens[start : start + size]
        entries = [sampling_pb2.TokenLogprobs(logprob=-1.0) for _ in ids]
        # The stop string "c" is not sent.
        text = ByteCodec().decode(tokens[: start + size]).rstrip("\ufffd").removesuffix("c")
        sent = message(text[len(choice.text) :], token_ids=ids, logprobs=entries)
        choice.add(sent, form.tokens_of(sent))
        offsets += read(form.event(0, sent))["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 1, 2, 3]
    whole = json.loads(form.whole([choice], 1))
    assert whole["object"] == "text_completion"
    (found,) = whole["choices"]
    assert (found["text"], found["logprobs"]["text_offset"]) == ("a\u20acb", offsets)


def test_tokens_are_returned_where_they_are_wanted() -> None:
    includes = Includes(token_ids=True)
    sent = message("ab", token_ids=[97, 98], finish_reason=LENGTH)
    collected = CollectedChoice()
    collected.add(sent, [])
    chat = ChatFormat(HEAD, ByteCodec(), includes=includes)
    chat.add_prompt([5, 6], 1)
    assert read(chat.first_event(0))["prompt_token_ids"] == [5, 6]
    assert read(chat.event(0, sent))["choices"][0]["token_ids"] == [97, 98]
    whole = json.loads(chat.whole([collected], 1))
    assert (whole["prompt_token_ids"], whole["choices"][0]["token_ids"]) == ([5, 6], [97, 98])
    completion = CompletionFormat(HEAD, ByteCodec(), includes=includes)
    completion.add_prompt([5, 6], 1)
    seen = [read(completion.event(0, sent))["choices"][0] for _ in range(2)]
    assert [choice.get("prompt_token_ids") for choice in seen] == [[5, 6], None]
    (choice,) = json.loads(completion.whole([collected], 1))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], [97, 98])
    assert chat.text_event(0, "x") is completion.text_event(0, "x") is None


def test_each_event_has_the_usage_so_far_where_it_is_wanted() -> None:
    form = ChatFormat(HEAD, ByteCodec(), includes=Includes(usage=True, continuous_usage=True))
    form.add_prompt([5, 6, 7], 1)
    events = [form.first_event(0)]
    events += [form.event(0, message("a", token_ids=[97] * size)) for size in (1, 2)]
    usages = [read(event)["usage"] for event in events]
    assert [usage["completion_tokens"] for usage in usages] == [0, 1, 3]
    assert {usage["prompt_tokens"] for usage in usages} == {3}


@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_a_choice_ends_with_its_latency(kind: type[ChatFormat | CompletionFormat]) -> None:
    last = message(finish_reason=LENGTH)
    last.timing.latency.first_token.total_us = 7
    last.timing.latency.first_token.parts.add(part=latency_pb2.LATENCY_PART_QUEUE, duration_us=7)
    form = kind(HEAD, ByteCodec())
    (choice,) = read(form.event(0, last))["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["latency"]["first_token"] == {"total_us": 7, "parts_us": {"queue": 7}}
    assert choice["latency"]["second_token"] is None
    collected = CollectedChoice()
    collected.add(last, [])
    (whole,) = json.loads(form.whole([collected], 1))["choices"]
    assert whole["latency"] == choice["latency"]
    (plain,) = read(form.event(0, message(finish_reason=LENGTH)))["choices"]
    assert "latency" not in plain


@pytest.mark.parametrize(
    "kind", [one for one in HeadraceError.__subclasses__() if one is not InvalidRequest]
)
def test_every_error_has_a_status_and_its_reason(kind: type[HeadraceError]) -> None:
    error = kind("what happened", metadata={"key": "value"})
    body = error_object(error)["error"]
    assert 400 <= status_of(error) < 600
    assert body["message"] == "what happened"
    assert body["code"] == CODES.get(kind, kind.reason.lower())
    assert body["headrace"] == {"reason": kind.reason, "metadata": {"key": "value"}}


def test_clients_learn_when_to_retry() -> None:
    assert headers_of(QueueFull("full", retry_after_s=2.4)) == {"retry-after": "2"}
    assert headers_of(QueueFull("full")) == {"retry-after": "1"}
    assert headers_of(errors.NotFound("gone")) == {}


def test_an_http_error_has_its_own_status() -> None:
    assert status_of(HttpError(405, "method", "use GET")) == 405


def scored(text: str, logprob: float = -1.5) -> list[sampling_pb2.TokenLogprobs]:
    """One entry for each byte after the first. The token "b" is the most probable one everywhere."""
    best = sampling_pb2.TokenAlternative(token_id=98, logprob=-0.5)
    return [
        sampling_pb2.TokenLogprobs(
            logprob=-0.5 if byte == 98 else logprob,
            alternatives=[best],
            rank=1 if byte == 98 else 7,
        )
        for byte in text.encode()[1:]
    ]


ECHO = Includes(prompt_text=True)


def echoing(prompt: str, includes: Includes = ECHO) -> CompletionFormat:
    form = CompletionFormat(HEAD, ByteCodec(), includes=includes, alternatives=1)
    form.add_prompt(prompt.encode(), 1, prompt)
    return form


def test_an_echo_has_the_prompt_with_its_logprobs_before_the_answer() -> None:
    choice = CollectedChoice()
    form = echoing("aé b")
    ids = "aé b".encode()
    choice.add(message(prompt_token_ids=ids, prompt_logprobs=scored("aé b")), [])
    answer = message("c", **logprobs(99, -2.5), finish_reason=LENGTH)
    choice.add(answer, form.tokens_of(answer))
    (found,) = json.loads(form.whole([choice], 1))["choices"]
    assert found["text"] == "aé bc"
    assert found["logprobs"]["tokens"] == ["a", "\ufffd", "\ufffd", " ", "b", "c"]
    assert found["logprobs"]["token_logprobs"] == [None, -1.5, -1.5, -1.5, -0.5, -2.5]
    assert found["logprobs"]["top_logprobs"][0] is None
    assert found["logprobs"]["top_logprobs"][3:] == [
        {"b": -0.5, " ": -1.5},
        {"b": -0.5},
        {"b": -2.0, "c": -2.5},
    ]
    assert found["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 4]
    assert "prompt_logprobs" not in found


def test_a_streamed_echo_has_the_same_in_parts() -> None:
    form = echoing("abcd")
    entries = scored("abcd")
    events = [
        form.first_event(0),
        form.event(0, message(prompt_token_ids=b"ab", prompt_logprobs=entries[:1])),
        form.event(0, message(prompt_token_ids=b"cd", prompt_logprobs=entries[1:])),
        form.event(0, message("e", **logprobs(101, -2.5))),
    ]
    choices = [read(event)["choices"][0] for event in events]
    assert [choice["text"] for choice in choices] == ["abcd", "", "", "e"]
    assert choices[0]["logprobs"] is None
    parts = [choice["logprobs"] for choice in choices[1:]]
    assert [part["text_offset"] for part in parts] == [[0, 1], [2, 3], [4]]
    assert [part["token_logprobs"] for part in parts] == [[None, -0.5], [-1.5, -1.5], [-2.5]]


def test_tokens_around_the_text_of_a_prompt_move_no_offset() -> None:
    class Marked(ByteCodec):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            text = super().decode([token for token in token_ids if token != 7])
            return f"<s>{text}" if 7 in token_ids else text

    offsets = PromptOffsets(Marked(), "ab")
    assert offsets.extend([7, *b"ab"]) == [0, 0, 1]


def test_prompt_logprobs_are_those_of_vllm() -> None:
    choice = CollectedChoice()
    choice.add(message(prompt_token_ids=b"aab", prompt_logprobs=scored("aab")), [])
    choice.add(message("c", finish_reason=LENGTH), [])
    includes = Includes(prompt_logprobs=True)
    best = {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    expected = [
        None,
        {"97": {"logprob": -1.5, "rank": 7, "decoded_token": "a"}, "98": best},
        {"98": best},
    ]
    whole = json.loads(ChatFormat(HEAD, ByteCodec(), includes=includes).whole([choice], 1))
    assert whole["prompt_logprobs"] == expected
    form = CompletionFormat(HEAD, ByteCodec(), includes=includes)
    (found,) = json.loads(form.whole([choice], 1))["choices"]
    assert (found["prompt_logprobs"], found["text"], found["logprobs"]) == (expected, "c", None)
