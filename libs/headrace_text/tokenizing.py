"""Calls the library tokenizers, within bounds."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace_common.errors import ConfigError
from headrace_text.codec import TooManyTokens

# A text with more characters for each token of the bound is counted in pieces first. English has four to five.
_CHARACTERS_PER_TOKEN = 6
_PIECE_CHARACTERS = 32_768
# Cutting a text changes the number of its tokens by a few at each cut.
_PIECES_SURPLUS = 1.25


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> Any:
    # `encode` keeps the global interpreter lock, and `encode_batch_fast` releases it.
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def reject_far_too_long(tokenizer: Any, text: str, tokens_max: int | None) -> None:
    """Raises TooManyTokens as soon as the first pieces of a long text have far too many tokens."""
    if tokens_max is None:
        return
    if len(text) <= max(_CHARACTERS_PER_TOKEN * tokens_max, 2 * _PIECE_CHARACTERS):
        return
    count = 0
    for start in range(0, len(text), _PIECE_CHARACTERS):
        count += len(encode(tokenizer, text[start : start + _PIECE_CHARACTERS]))
        if count > _PIECES_SURPLUS * tokens_max + _PIECE_CHARACTERS:
            raise TooManyTokens


def bounded_ids(encoding: Any, tokens_max: int | None) -> list[int]:
    # The list is made under the global interpreter lock.
    if tokens_max is not None and len(encoding) > tokens_max:
        raise TooManyTokens(len(encoding))
    ids: list[int] = encoding.ids
    return ids


def make_tokenizer(folder: Path, description: Mapping[str, Any]) -> Any:
    # Of several texts, tokenizers would encode each on a thread of their own pool.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = Tokenizer.from_str(json.dumps(description))
    except Exception as error:
        raise not_a_model(folder, f"has a tokenizer.json that cannot be read ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def not_a_model(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"model folder {folder} {why}: "
        "set model to NAME=FOLDER with a folder that holds config.json and tokenizer.json",
        metadata={"folder": str(folder)},
    )
