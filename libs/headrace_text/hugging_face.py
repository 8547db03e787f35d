"""The codec of a model folder in Hugging Face's format."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace_common.errors import ConfigError, InvalidRequest
from headrace_text.chat_template import ChatTemplate
from headrace_text.codec import ChatMessage, TextCodec, TooManyTokens
from headrace_text.control_tokens import ControlTokens, EscapedChat, control_texts

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_NO_TEXT = (
    "has the text of a control token, which this model's tokenizer cannot encode as text; remove it"
)
_CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
)
# A text with more characters for each token of the bound is counted in pieces first. English has four to five.
_CHARACTERS_PER_TOKEN = 6
_PIECE_CHARACTERS = 32_768
# Cutting a text changes the number of its tokens by a few at each cut.
_PIECES_SURPLUS = 1.25


class HuggingFaceCodec(TextCodec):
    """Reads a folder's JSON and Jinja files, once."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError naming the file that is missing or broken, and the remedy."""
        self._folder = folder
        config = _read_json(folder, "config.json", required=True)
        tokenizer_config = _read_json(folder, "tokenizer_config.json", required=False)
        description = _read_json(folder, "tokenizer.json", required=True)
        self._tokenizer = _make_tokenizer(folder, description)
        special_tokens = _special_tokens(tokenizer_config)
        self.vocabulary_size = _text_field(config, "vocab_size") or self._tokenizer.get_vocab_size()
        self.longest_token_bytes = _longest_token_bytes(description, self._tokenizer)
        self.max_model_len = next(
            (value for name in _CONTEXT_FIELDS if (value := _text_field(config, name))), 0
        )
        self.stop_token_ids = self._stop_tokens(config, special_tokens)
        source = _template_source(folder, tokenizer_config)
        self._chat = (
            _ChatEncoder(folder, description, self._tokenizer, source, special_tokens)
            if source
            else None
        )

    def encode(self, text: str, tokens_max: int | None = None) -> list[int]:
        _reject_far_too_long(self._tokenizer, text, tokens_max)
        return _bounded_ids(_encode(self._tokenizer, text, add_special_tokens=True), tokens_max)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        continue_final_message: bool,
        tokens_max: int | None = None,
    ) -> list[int]:
        if self._chat is None:
            raise InvalidRequest({"chat": "the model has no chat template; send text instead"})
        return self._chat.encode(messages, continue_final_message, tokens_max)

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


class _ChatEncoder:
    """Renders and encodes conversations. Only the chat template makes control tokens."""

    def __init__(
        self,
        folder: Path,
        description: Mapping[str, Any],
        tokenizer: Any,
        source: str,
        special_tokens: Mapping[str, str],
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(source, special_tokens)
        added: list[dict[str, Any]] = description.get("added_tokens") or []
        texts = control_texts(
            ((token["content"], token["special"]) for token in added), tokenizer, self._frames()
        )
        self._control_tokens = ControlTokens(texts)
        self._control_ids = frozenset(map(tokenizer.token_to_id, texts))
        # With this switch a tokenizer treats special tokens as text. Here these are the control tokens.
        tokens = [{**token, "special": token["content"] in texts} for token in added]
        self._plain = _make_tokenizer(folder, {**description, "added_tokens": tokens})
        self._plain.encode_special_tokens = True
        self._normalizes_control_texts = description.get("normalizer") is not None and any(
            token["normalized"] for token in added if token["content"] in texts
        )

    def encode(
        self, messages: Sequence[ChatMessage], continue_final_message: bool, tokens_max: int | None
    ) -> list[int]:
        contents = "\n".join(message.content for message in messages)
        _reject_far_too_long(self._tokenizer, contents, tokens_max)
        escaped = self._control_tokens.escape(messages)
        if self._normalizes_control_texts:
            self._check_normalized(escaped.messages)
        text = self._template.render(
            escaped.messages, continue_final_message=continue_final_message
        )
        # The template contains the special tokens: adding them here would double them.
        if escaped.originals:
            return self._encode_escaped(text, escaped, tokens_max)
        return _bounded_ids(_encode(self._tokenizer, text), tokens_max)

    def _encode_escaped(self, text: str, escaped: EscapedChat, tokens_max: int | None) -> list[int]:
        """Encodes the texts between two control tokens of the template by themselves, as tokenizers do."""
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        least_count = len(encoding) - escaped.placeholder_characters
        if tokens_max is not None and least_count > tokens_max:
            raise TooManyTokens(least_count)
        ids: list[int] = []
        position = 0
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._control_ids:
                ids += self._encode_content(text[position:start], escaped)
                ids.append(token_id)
                position = end
        ids += self._encode_content(text[position:], escaped)
        if tokens_max is not None and len(ids) > tokens_max:
            raise TooManyTokens(len(ids))
        return ids

    def _encode_content(self, text: str, escaped: EscapedChat) -> list[int]:
        if not text:
            return []
        ids: list[int] = _encode(self._plain, escaped.restore(text)).ids
        if not self._control_ids.isdisjoint(ids):
            raise InvalidRequest({"chat.messages": _NO_TEXT})
        return ids

    def _check_normalized(self, messages: Sequence[ChatMessage]) -> None:
        """Raises InvalidRequest for a content that becomes a control text only when it is normalized."""
        for index, message in enumerate(messages):
            ids = _encode(self._tokenizer, message.content).ids
            if not self._control_ids.isdisjoint(ids):
                raise InvalidRequest({f"chat.messages[{index}].content": _NO_TEXT})

    def _frames(self) -> Iterator[str]:
        for roles in (("user",), ("system", "user", "assistant", "user")):
            messages = [ChatMessage(role, "x") for role in roles]
            # Some templates reject system messages.
            with suppress(InvalidRequest):
                yield self._template.render(messages, continue_final_message=False)


def _encode(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> Any:
    # `encode` keeps the global interpreter lock, and `encode_batch_fast` releases it.
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def _reject_far_too_long(tokenizer: Any, text: str, tokens_max: int | None) -> None:
    """Raises TooManyTokens as soon as the first pieces of a long text have far too many tokens."""
    if tokens_max is None:
        return
    if len(text) <= max(_CHARACTERS_PER_TOKEN * tokens_max, 2 * _PIECE_CHARACTERS):
        return
    count = 0
    for start in range(0, len(text), _PIECE_CHARACTERS):
        count += len(_encode(tokenizer, text[start : start + _PIECE_CHARACTERS]))
        if count > _PIECES_SURPLUS * tokens_max + _PIECE_CHARACTERS:
            raise TooManyTokens


def _bounded_ids(encoding: Any, tokens_max: int | None) -> list[int]:
    # The list is made under the global interpreter lock.
    if tokens_max is not None and len(encoding) > tokens_max:
        raise TooManyTokens(len(encoding))
    ids: list[int] = encoding.ids
    return ids


def _make_tokenizer(folder: Path, description: Mapping[str, Any]) -> Any:
    # Of several texts, tokenizers would encode each on a thread of their own pool.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = Tokenizer.from_str(json.dumps(description))
    except Exception as error:
        raise _not_a_model(folder, f"has a tokenizer.json that cannot be read ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _longest_token_bytes(description: Mapping[str, Any], tokenizer: Any) -> int:
    """0 unless the tokenizer keeps every byte of the text."""
    added: list[dict[str, Any]] = description.get("added_tokens") or []
    if description.get("normalizer") or any(token["lstrip"] or token["rstrip"] for token in added):
        return 0
    if not _is_byte_level(description.get("pre_tokenizer") or {}):
        return 0
    # A letter of a token stands for one byte. Added tokens are plain text.
    letters = max(map(len, tokenizer.get_vocab(with_added_tokens=False)), default=0)
    return max([letters, *(len(token["content"].encode()) for token in added)])


def _is_byte_level(pre_tokenizer: Mapping[str, Any]) -> bool:
    parts: list[dict[str, Any]] = pre_tokenizer.get("pretokenizers") or []
    return pre_tokenizer.get("type") == "ByteLevel" or any(map(_is_byte_level, parts))


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
