"""Loads the codecs of all served models. That of the simulated model has one token per byte."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from headrace_text.codec import ChatMessage, TextCodec, TooManyTokens
from headrace_text.model_hub import TEXT_FILES, fetch_model, parse_hub_model

_BYTE_COUNT = 256
# The simulated engine has the same default.
_VOCABULARY_SIZE = 32_000
# Tokens beyond the bytes have no text of their own. Each decodes to an ASCII word of two syllables, because every
# terminal shows it and a search finds it.
_SYLLABLES = tuple(
    consonant + vowel + end
    for end in ("", "n")
    for vowel in "aeiou"
    for consonant in "bcdfghjklmnprstvwyz"
)


class ByteCodec(TextCodec):
    """Tokens 0-255 are the bytes of UTF-8. Other tokens decode to a space and a word, each to its own.

    `encode` never returns them.
    """

    vocabulary_size = _VOCABULARY_SIZE
    longest_token_bytes = 1
    max_model_len = 0
    stop_token_ids: frozenset[int] = frozenset()
    tool_call_parser = "hermes"

    def encode(self, text: str, tokens_max: int | None = None) -> list[int]:
        content = text.encode()
        if tokens_max is not None and len(content) > tokens_max:
            raise TooManyTokens(len(content))
        return list(content)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        continue_final_message: bool,
        tokens_max: int | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        cache_scope: str = "",
        add_generation_prompt: bool = True,
    ) -> array[int]:
        lines = [f"{name}: {value}" for name, value in sorted((template_kwargs or {}).items())]
        lines += [f"tool: {json.dumps(tool, ensure_ascii=False)}" for tool in tools]
        lines += map(_line, messages)
        text = "\n".join(lines)
        if add_generation_prompt and not continue_final_message:
            text = f"{text}\nassistant: "
        return array("I", self.encode(text, tokens_max))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(map(_token_bytes, token_ids)).decode(errors="replace")


def _line(message: ChatMessage) -> str:
    calls = [
        f" {call.name}({json.dumps(call.arguments, ensure_ascii=False)})"
        for call in message.tool_calls
    ]
    return f"{message.role}: {message.reasoning}{message.content}{''.join(calls)}"


@lru_cache(_VOCABULARY_SIZE)
def _token_bytes(token_id: int) -> bytes:
    if token_id < _BYTE_COUNT:
        return bytes((token_id,))
    first, second = divmod(token_id - _BYTE_COUNT, len(_SYLLABLES))
    return f" {_SYLLABLES[first % len(_SYLLABLES)]}{_SYLLABLES[second]}".encode("ascii")


SIMULATED_MODEL = "sim"


def load_codecs(models: Mapping[str, str]) -> dict[str, TextCodec]:
    """The codec of each model by served name. `models` maps a served name to a folder, to
    a model on a hub as "hf:OWNER/NAME", or to "sim".

    Raises ConfigError naming the folder at fault.
    """
    return {
        name: ByteCodec() if folder == SIMULATED_MODEL else _load_hugging_face(folder)
        for name, folder in models.items()
    }


def _load_hugging_face(model: str) -> TextCodec:
    # Tokenizers and Jinja are slow to import, and "sim" needs neither.
    from headrace_text.hugging_face import HuggingFaceCodec

    hub_model = parse_hub_model(model)
    return HuggingFaceCodec(
        Path(model) if hub_model is None else fetch_model(hub_model, TEXT_FILES)
    )
