"""The bytes and tokens that a client's request may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.errors import InvalidRequest
from headrace_common.limits import (
    IMAGES_BYTES_MAX,
    JSON_NUMBERS_PER_TOKEN_MAX,
    JSON_PARTS_MAX,
    PROMPT_LOGPROBS_VALUES_MAX,
    UNKNOWN_CONTEXT_TOKENS,
)
from headrace_frontend.request.chat import text_bytes
from headrace_frontend.request.json_text import count_values, values_at_most
from headrace_text.codec import TextCodec

CONTEXT_WORDS: Final = "this model's maximum context length is"
"""Agents and gateways recognize a prompt that is too long by these words of OpenAI."""
BYTES_PER_TOKEN_MAX: Final = 16
"""Bytes of text that a prompt may have for each token of the context. English text has 4 to 5."""
# A token of the prompt and one of the answer so far, as numbers in a message.
_NUMBER_BYTES: Final = 10
_OTHER_BYTES: Final = 1024 * 1024
# In base64 with line ends.
_IMAGES_BYTES: Final = IMAGES_BYTES_MAX // 3 * 4 + 1024 * 1024


def needed_request_bytes(context: int) -> int:
    """Bytes that a request for a context of this many tokens can need."""
    return _OTHER_BYTES + context * (BYTES_PER_TOKEN_MAX + _NUMBER_BYTES)


def request_bytes_max(contexts: Iterable[int], *, images: bool = False) -> int:
    """Bytes that a request may have: what one for the longest context needs, or for UNKNOWN_CONTEXT_TOKENS.

    `images`: whether it may have images.
    """
    needed = needed_request_bytes(max((UNKNOWN_CONTEXT_TOKENS, *contexts)))
    return needed + _IMAGES_BYTES * images


class RequestSizeCheck:
    """Bounds a request by the longest context.

    `max_model_len` returns the context length of each served model. `images`: whether a request may have images.
    """

    def __init__(
        self, max_model_len: Callable[[], Mapping[str, int]], *, images: bool = False
    ) -> None:
        self._images_bytes = _IMAGES_BYTES * images
        self._max_model_len = max_model_len

    def check(self, request_bytes: int) -> None:
        """Raises InvalidRequest for more bytes than a prompt for the longest context needs."""
        if request_bytes <= _OTHER_BYTES:
            return
        context = self._longest_context()
        bytes_max = needed_request_bytes(context) + self._images_bytes
        if request_bytes > bytes_max:
            raise InvalidRequest(
                {
                    "request": f"has {request_bytes} bytes, and {CONTEXT_WORDS} {context} tokens, for which "
                    f"a request needs at most {bytes_max}; shorten it"
                },
                cause="context_length_exceeded",
            )

    def check_json(self, data: bytes) -> int:
        """Bounds an HTTP body in bytes and in values, before objects are made of it. Raises InvalidRequest.

        Returns the bytes of text that take as long to tokenize as this takes to parse.
        """
        self.check(len(data))
        values = values_at_most(data)
        if values > JSON_PARTS_MAX // 2:
            self._check_values(data)
        # Strings take 0.1 ms for each 32 KiB, and other values up to 5 us each.
        return len(data) // 256 + values * 6

    def _check_values(self, data: bytes) -> None:
        values, parts = count_values(data, JSON_PARTS_MAX)
        context = self._longest_context() or UNKNOWN_CONTEXT_TOKENS
        values_max = JSON_PARTS_MAX + context * JSON_NUMBERS_PER_TOKEN_MAX
        if parts > JSON_PARTS_MAX or values > values_max:
            raise InvalidRequest(
                {
                    "body": f"must have at most {JSON_PARTS_MAX} strings, objects and arrays, names of fields "
                    f"included, and {values_max} values in all; send less in one request"
                }
            )

    def check_text(self, text_bytes: int) -> None:
        """Raises InvalidRequest for a text of more bytes than the longest context takes."""
        context = self._longest_context()
        bytes_max = context * BYTES_PER_TOKEN_MAX
        # Without any model, no context is known.
        if context and text_bytes > bytes_max:
            raise InvalidRequest(
                {
                    "text": f"has {text_bytes} bytes of text, and {CONTEXT_WORDS} {context} tokens, which takes at "
                    f"most {bytes_max}; shorten it by {text_bytes - bytes_max} bytes"
                },
                cause="context_length_exceeded",
            )

    def _longest_context(self) -> int:
        lengths = self._max_model_len().values()
        return max((length or UNKNOWN_CONTEXT_TOKENS for length in lengths), default=0)


def byte_violations(
    request: inference_pb2.GenerateRequest, codec: TextCodec, context: int
) -> dict[str, str]:
    """Remedies for a prompt of too many bytes or ids. Counts them, which takes far less time than tokenizing does."""
    if request.HasField("tokens"):
        return length_violations(request, len(request.tokens.ids), context)
    tokens_max = context or UNKNOWN_CONTEXT_TOKENS
    bytes_max = tokens_max * min(BYTES_PER_TOKEN_MAX, codec.longest_token_bytes or math.inf)
    # Most prompts fit as they are, with more than their texts.
    if request.ByteSize() <= bytes_max:
        return {}
    size = len(request.text.encode()) if request.HasField("text") else text_bytes(request.chat)
    if size <= bytes_max:
        return {}
    remedy = f"has {size} bytes of text, and {CONTEXT_WORDS} {tokens_max} tokens, which takes at most {bytes_max}"
    return {prompt_field(request): f"{remedy}; shorten it by {size - bytes_max} bytes"}


def length_violations(
    request: inference_pb2.GenerateRequest, prompt_tokens: int, context: int
) -> dict[str, str]:
    """Remedies for a prompt of so many tokens."""
    if not prompt_tokens:
        return {prompt_field(request): "must make at least one token"}
    if not context:
        return {}
    room = context - prompt_tokens
    if room < 1:
        remedy = f"has {prompt_tokens} tokens, and {CONTEXT_WORDS} {context} tokens, which must also fit one"
        return {prompt_field(request): f"{remedy} generated token; shorten it by {1 - room}"}
    if request.sampling.max_tokens > room:
        return {
            "sampling.max_tokens": f"must be at most {room}, as the prompt has {prompt_tokens} tokens and "
            f"{CONTEXT_WORDS} {context} tokens, not {request.sampling.max_tokens}"
        }
    return {}


def room_violations(
    sampling: sampling_pb2.SamplingParams, max_tokens: int, generated_tokens: int
) -> dict[str, str]:
    """Remedies that need the number of tokens that fit into the context."""
    violations: dict[str, str] = {}
    if generated_tokens > max_tokens:
        violations["generated.ids"] = (
            f"must hold at most max_tokens, {max_tokens}, not {generated_tokens}"
        )
    if sampling.min_tokens > max_tokens:
        violations["sampling.min_tokens"] = (
            f"must be at most {max_tokens}, the rest of the context, not {sampling.min_tokens}"
        )
    return violations


def prompt_logprobs_violations(
    request: inference_pb2.GenerateRequest, prompt_tokens: int
) -> dict[str, str]:
    """The remedy for more logprobs of the prompt than are reported, where they are asked for."""
    answers = max(1, request.n, request.best_of)
    alternatives = request.sampling.prompt_logprobs
    values = prompt_tokens * (alternatives + 1) * answers
    if values <= PROMPT_LOGPROBS_VALUES_MAX:
        return {}
    return {
        "sampling.prompt_logprobs": f"{prompt_tokens} prompt tokens with {alternatives} alternatives for {answers} "
        f"answers are {values} values, and at most {PROMPT_LOGPROBS_VALUES_MAX} are reported; shorten the "
        "prompt or lower the alternatives"
    }


def tokens_left(max_model_len: int, prompt_tokens: int) -> int:
    """Tokens that fit into the context after the prompt. 1 where the context length is unknown."""
    return max(1, max_model_len - prompt_tokens)


def prompt_field(request: inference_pb2.GenerateRequest) -> str:
    """The path of the field that has the prompt."""
    if request.HasField("chat"):
        return "chat.messages"
    return "tokens.ids" if request.HasField("tokens") else "text"
