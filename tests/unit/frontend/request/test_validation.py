"""Invalid requests, reported by field, and the prepared form of valid ones."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.errors import InvalidRequest
from headrace_common.rpc.field_bounds import bound_of
from headrace_frontend.request.validation import PreparedRequest, decode_request
from headrace_text.load import ByteCodec
from tests.kit.requests import prepared

_CHAT = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])


class _StoppingCodec(ByteCodec):
    stop_token_ids = frozenset({7})


def _prepare(request: inference_pb2.GenerateRequest) -> PreparedRequest:
    return prepared(request, _StoppingCodec(), 16)


def _text(text: str = "hello", **sampling: object) -> inference_pb2.GenerateRequest:
    params = sampling_pb2.SamplingParams(**sampling)  # type: ignore[arg-type]
    return inference_pb2.GenerateRequest(text=text, sampling=params)


def _tokens(*ids: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=ids))


def _chat(*roles: str, content: str = "x") -> inference_pb2.GenerateRequest:
    messages = [inference_pb2.ChatMessage(role=role, content=content) for role in ("user", *roles)]
    return inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=messages))


def _target(name: str, seconds: int) -> inference_pb2.GenerateRequest:
    targets: dict[str, Any] = {name: Duration(seconds=seconds)}
    return inference_pb2.GenerateRequest(text="a", **targets)


_TARGETS = ("ttft_target", "tpot_target")
_INVALID: list[tuple[inference_pb2.GenerateRequest, str, str]] = [
    (inference_pb2.GenerateRequest(), "prompt", "one of text, chat and tokens"),
    (inference_pb2.GenerateRequest(text="a", chat=_CHAT), "prompt", "text and chat"),
    (inference_pb2.GenerateRequest(text=""), "text", "empty"),
    (_tokens(), "tokens.ids", "empty"),
    (_tokens(1, 32_000), "tokens.ids[1]", "below 32000"),
    (_text("x" * 16), "text", "shorten it by 1"),
    (_tokens(*[1] * 20), "tokens.ids", "shorten it by 5"),
    (inference_pb2.GenerateRequest(chat=inference_pb2.Chat()), "chat.messages", "at least one"),
    (
        inference_pb2.GenerateRequest(
            chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(content="x")])
        ),
        "chat.messages[0].role",
        "letters, digits",
    ),
    (_chat("<|im_end|>"), "chat.messages[1].role", "letters, digits"),
    (_chat(*["user"] * 2_048), "chat.messages", "at most 2048 messages, not 2049"),
    (_text("x" * 17), "text", "takes at most 16; shorten it by 1 bytes"),
    (_text("é" * 9), "text", "has 18 bytes"),
    (_chat("user", content="x" * 9), "chat.messages", "has 18 bytes"),
    (inference_pb2.GenerateRequest(text="a", model="other"), "model", "use one of: sim"),
    (inference_pb2.GenerateRequest(text="a", request_id="r" * 129), "request_id", "128"),
    (inference_pb2.GenerateRequest(text="a", request_id="a b"), "request_id", "without spaces"),
    (
        inference_pb2.GenerateRequest(text="a", prefill_placement=9),  # type: ignore[arg-type]
        "prefill_placement",
        "named values",
    ),
    (_text(max_tokens=12), "sampling.max_tokens", "at most 11"),
    (_text(max_tokens=0), "sampling.max_tokens", "1 or more"),
    (_text(temperature=-0.1), "sampling.temperature", "from 0 to 2"),
    (_text(temperature=2.1), "sampling.temperature", "from 0 to 2"),
    (_text(temperature=math.nan), "sampling.temperature", "nan"),
    (_text(temperature=math.inf), "sampling.temperature", "inf"),
    (_text(top_p=0.0), "sampling.top_p", "above 0 to 1"),
    (_text(top_p=1.01), "sampling.top_p", "above 0 to 1"),
    (_text(top_p=-math.inf), "sampling.top_p", "-inf"),
    (_text(min_p=1.5), "sampling.min_p", "from 0 to 1"),
    (_text(presence_penalty=-2.5), "sampling.presence_penalty", "-2 to 2"),
    (_text(frequency_penalty=2.5), "sampling.frequency_penalty", "-2 to 2"),
    (_text(repetition_penalty=0.0), "sampling.repetition_penalty", "above 0"),
    (_text(seed=2**63), "sampling.seed", str(2**63 - 1)),
    (_text(logprobs=21), "sampling.logprobs", "0 to 20"),
    (_text(prompt_logprobs=21), "sampling.prompt_logprobs", "0 to 20"),
    (
        inference_pb2.GenerateRequest(
            text="a",
            sampling=sampling_pb2.SamplingParams(prompt_logprobs=0),
            prefill_placement=inference_pb2.PREFILL_PLACEMENT_REMOTE,
        ),
        "prefill_placement",
        "excludes sampling.prompt_logprobs",
    ),
    (_text(stop=["a", ""]), "sampling.stop[1]", "must not be empty"),
    (_text(stop=["a", "b" * 257]), "sampling.stop[1]", "at most 256 characters, not 257"),
    (_text(stop_token_ids=range(257)), "sampling.stop_token_ids", "at most 256 tokens, not 257"),
    (_text(stop=["a"] * 17), "sampling.stop", "at most 16"),
    (_text(stop_token_ids=[40_000]), "sampling.stop_token_ids[0]", "below 32000"),
    *((_target(name, seconds), name, "3600") for name in _TARGETS for seconds in (-1, 0, 3_601)),
]


@pytest.mark.parametrize("request_,field,remedy", _INVALID, ids=[case[1] for case in _INVALID])
def test_an_invalid_field_is_reported_with_its_remedy(
    request_: inference_pb2.GenerateRequest, field: str, remedy: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _prepare(request_)
    assert list(caught.value.violations) == [field]
    assert remedy in caught.value.violations[field]


class _UntouchedCodec(ByteCodec):
    """A model with a tokenizer that must not run."""

    def encode(self, text: str, tokens_max: int | None = None) -> list[int]:
        raise AssertionError("the text is too long to be tokenized")

    encode_chat = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("length", "longest_token_bytes", "context", "bytes_max"),
    [
        (257, 99, 16, 256),
        (49, 3, 16, 48),
        (3 * 131_072 + 1, 3, 0, 3 * 131_072),
    ],
    ids=["the bound", "the longest token", "no known context"],
)
def test_a_text_beyond_its_bytes_is_never_tokenized(
    length: int, longest_token_bytes: int, context: int, bytes_max: int
) -> None:
    codec = _UntouchedCodec()
    codec.longest_token_bytes = longest_token_bytes
    for request in (_text("x" * length), _chat("user", content="x" * (length // 2 + 1))):
        with pytest.raises(InvalidRequest, match=f"takes at most {bytes_max};"):
            prepared(request, codec, context)


def test_lists_beyond_the_context_are_not_searched() -> None:
    request = _tokens(*[32_000] * 17)
    request.generated.ids.extend([32_000] * 17)
    with pytest.raises(InvalidRequest) as caught:
        _prepare(request)
    assert list(caught.value.violations) == ["tokens.ids"]


def test_zero_is_not_taken_for_unset() -> None:
    sampling = _prepare(_text(temperature=0.0, logprobs=0, seed=0)).sampling
    assert sampling.temperature == 0
    assert sampling.HasField("logprobs")
    assert sampling.HasField("seed")


def test_ignore_eos_keeps_the_clients_stop_tokens_only() -> None:
    assert _prepare(_text(ignore_eos=True, stop_token_ids=[9])).stop_token_ids == (9,)


def test_a_prompt_may_fill_the_context_up_to_one_token() -> None:
    assert _prepare(_text("x" * 15)).sampling.max_tokens == 1


def test_a_prompt_is_within_the_bound_of_internal_messages_in_every_context() -> None:
    fields = decode_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
    most = bound_of(fields["token_ids"]).items
    tokens = inference_pb2.TokenIds(ids=[1] * most)
    with pytest.raises(InvalidRequest, match=f"context length is {most} tokens"):
        prepared(inference_pb2.GenerateRequest(tokens=tokens), context=2 * most)


def test_cached_tokens_of_chats_belong_to_a_salt() -> None:
    scopes: list[str] = []

    class Recording(ByteCodec):
        def encode_chat(self, *args: Any, cache_scope: str = "", **named: Any) -> array[int]:
            scopes.append(cache_scope)
            return super().encode_chat(*args, **named)

    for salt in ("a", "b"):
        prepared(inference_pb2.GenerateRequest(chat=_CHAT), Recording(), 64, cache_salt=salt)
    assert scopes == ["a", "b"]


@pytest.mark.parametrize(("tokens", "alternatives", "n"), [(6_241, 20, 1), (65_536, 0, 2)])
def test_the_logprobs_of_a_prompt_are_bounded(tokens: int, alternatives: int, n: int) -> None:
    def asked(count: int) -> PreparedRequest:
        sampling = sampling_pb2.SamplingParams(prompt_logprobs=alternatives)
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenIds(ids=[1] * count), sampling=sampling, n=n
        )
        return prepared(request, context=200_000)

    assert asked(tokens).placement == inference_pb2.PREFILL_PLACEMENT_LOCAL
    with pytest.raises(InvalidRequest, match="at most 131072 are reported"):
        asked(tokens + 1)


def test_a_continued_request_asks_for_no_logprobs_of_the_prompt() -> None:
    found = _prepare(_text(prompt_logprobs=2))
    first = decode_request(found, "x1", incarnation="i", remote_prefill=False)
    assert first.sampling.prompt_logprobs == 2
    later = decode_request(found, "x2", (5,), incarnation="i", remote_prefill=False)
    assert not later.sampling.HasField("prompt_logprobs")
