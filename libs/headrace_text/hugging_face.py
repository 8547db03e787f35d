"""The codec of a model folder in Hugging Face's format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace_common.errors import ConfigError, InvalidRequest
from headrace_text.chat_template import ChatTemplate
from headrace_text.codec import ChatMessage, TextCodec

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
)


class HuggingFaceCodec(TextCodec):
    """Reads a folder's JSON and Jinja files, once."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError naming the file that is missing or broken, and the remedy."""
        self._folder = folder
        config = _read_json(folder, "config.json", required=True)
        tokenizer_config = _read_json(folder, "tokenizer_config.json", required=False)
        self._tokenizer = _load_tokenizer(folder)
        special_tokens = _special_tokens(tokenizer_config)
        self.vocabulary_size = _text_field(config, "vocab_size") or self._tokenizer.get_vocab_size()
        self.max_model_len = next(
            (value for name in _CONTEXT_FIELDS if (value := _text_field(config, name))), 0
        )
        self.stop_token_ids = self._stop_tokens(config, special_tokens)
        source = _template_source(folder, tokenizer_config)
        self._template = ChatTemplate(source, special_tokens) if source else None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        return ids

    def encode_chat(
        self, messages: Sequence[ChatMessage], *, continue_final_message: bool
    ) -> list[int]:
        if self._template is None:
            raise InvalidRequest({"chat": "the model has no chat template; send text instead"})
        text = self._template.render(messages, continue_final_message=continue_final_message)
        # The template contains the special tokens: adding them here would double them.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _stop_tokens(
        self, config: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> frozenset[int]:
        generation = _read_json(self._folder, "generation_config.json", required=False)
        stops = _token_ids(generation.get("eos_token_id", _text_field(config, "eos_token_id")))
        own_id = self._tokenizer.token_to_id(special_tokens.get("eos_token", ""))
        return frozenset(stops if own_id is None else (*stops, own_id))


def _load_tokenizer(folder: Path) -> Any:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise _not_a_model(folder, "has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise _not_a_model(folder, f"has a tokenizer.json that cannot be read ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(folder: Path, name: str, *, required: bool) -> dict[str, Any]:
    path = folder / name
    if not path.is_file():
        if required:
            raise _not_a_model(folder, f"has no {name}" if folder.is_dir() else "does not exist")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _not_a_model(folder, f"has a {name} that cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise _not_a_model(folder, f"has a {name} that holds no object")
    return value


def _not_a_model(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"model folder {folder} {why}: "
        "set model to NAME=FOLDER with a folder that holds config.json and tokenizer.json",
        metadata={"folder": str(folder)},
    )


def _text_field(config: Mapping[str, Any], name: str) -> Any:
    """A setting of the text model. Multimodal models have it in `text_config`."""
    part = config.get("text_config")
    value = config.get(name)
    return part.get(name) if value is None and isinstance(part, dict) else value


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = tokenizer_config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _template_source(folder: Path, tokenizer_config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = tokenizer_config.get("chat_template") or ""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template", "") for entry in value}
        value = named.get("default", "")
    return str(value)
