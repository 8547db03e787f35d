"""The codec of a model folder in Hugging Face's format."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers.decoders import DecodeStream

from headrace_common.errors import InvalidRequest
from headrace_text.chat_encoder import ChatEncoder
from headrace_text.chat_template import template_values, with_system_first
from headrace_text.codec import SPECIAL_TOKEN_NAMES, ChatMessage, TextCodec
from headrace_text.encoder import (
    FastEncoder,
    check_count,
    make_tokenizer,
    not_a_model,
    reject_far_too_long,
    text_encoder,
)
from headrace_text.images import image_rule, processor_settings

_REPLACEMENT: Final = "\ufffd"
_LATE_SYSTEM: Final = (ChatMessage("user", "x"), ChatMessage("system", "x"))


def _letters() -> dict[str, int]:
    """The byte that each letter of a token stands for. Invisible characters have letters from U+0100 on."""
    visible = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = [byte for byte in range(0x100) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF: Final[Mapping[str, int]] = _letters()


def is_byte_level(description: Mapping[str, Any]) -> bool:
    """Whether a tokenizer joins the bytes of its tokens and does nothing else. `description` is its tokenizer.json."""
    return (description.get("decoder") or {}).get("type") == "ByteLevel"


class TokenBytes(dict[int, bytes]):
    """The bytes of each token, found when they are asked for first. A token that does not exist has none."""

    def __init__(self, text_of: Callable[[int], str | None], left_out: Collection[int]) -> None:
        """`text_of` gives the tokenizer's own text of a token. Those in `left_out` have no bytes."""
        super().__init__(dict.fromkeys(left_out, b""))
        self._text_of = text_of

    def __missing__(self, token_id: int) -> bytes:
        text = self._text_of(token_id)
        if text is None:
            return b""
        try:
            found = bytes(map(_BYTE_OF.__getitem__, text))
        except KeyError:
            # Added tokens are plain text.
            found = text.encode()
        self[token_id] = found
        return found


class ByteStep:
    """Takes the tokens of one text after a whole character. See TextCodec.decode_step."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes_of = token_bytes.__getitem__
        self._held = b""
        """The bytes since the last text."""

    def begins_after(self, token_ids: Sequence[int]) -> bool:
        """Whether the text of these tokens ends with a whole character."""
        data = b"".join(map(self._bytes_of, token_ids))
        return not data.decode(errors="replace").endswith(_REPLACEMENT)

    def __call__(self, tokens: int | list[int]) -> str | None:
        """The text that the tokens complete, or None while a character is incomplete."""
        if isinstance(tokens, int):
            data = self._held + self._bytes_of(tokens)
        else:
            data = self._held + b"".join(map(self._bytes_of, tokens))
        text = data.decode(errors="replace")
        if text.endswith(_REPLACEMENT):
            self._held = data
            return None
        self._held = b""
        return text


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
        description = _read_json(folder, "tokenizer.json", required=True)
        self._tokenizer = make_tokenizer(folder, description)
        self._encoder = text_encoder(self._tokenizer, description)
        self.encodes_fast = isinstance(self._encoder, FastEncoder)
        special_tokens = _special_tokens(tokenizer_config)
        self.vocabulary_size = _text_field(config, "vocab_size") or self._tokenizer.get_vocab_size()
        self.longest_token_bytes = _longest_token_bytes(description, self._tokenizer)
        self.max_model_len = next(
            (value for name in _CONTEXT_FIELDS if (value := _text_field(config, name))), 0
        )
        self.stop_token_ids = self._stop_tokens(config, special_tokens)
        self._token_bytes = _token_bytes(description, self._tokenizer)
        rule = image_rule(
            config,
            processor_settings(
                _read_json(folder, "preprocessor_config.json", required=False),
                _read_json(folder, "processor_config.json", required=False),
            ),
            self._tokenizer.id_to_token,
        )
        if isinstance(rule, str):
            self.images_refusal = rule
        else:
            self.images = rule
        source = _template_source(folder, tokenizer_config)
        image_text = "" if self.images is None else self.images.token_text
        self._chat = (
            ChatEncoder(
                folder,
                description,
                self._tokenizer,
                self._encoder.encode,
                source,
                special_tokens,
                image_text,
            )
            if source
            else None
        )
        if self._chat is not None:
            self.tool_call_parser = self._chat.tool_call_parser
            self.reasoning_parser = self._chat.reasoning_parser
        self._refuses_late_system = False
        self._refuses_late_system = bool(source) and self._refuses(_LATE_SYSTEM)

    def _refuses(self, messages: Sequence[ChatMessage]) -> bool:
        try:
            self.encode_chat(messages, continue_final_message=False)
        except InvalidRequest:
            return True
        return False

    def encode(self, text: str, tokens_max: int | None = None) -> list[int]:
        reject_far_too_long(self._tokenizer, [text], tokens_max)
        ids = self._encoder.encode(text, add_special_tokens=True)
        check_count(len(ids), tokens_max)
        return ids

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
        if self._chat is None:
            raise InvalidRequest({"chat": "the model has no chat template; send text instead"})
        if self._refuses_late_system:
            messages = with_system_first(messages)
        values = template_values(messages, tools, template_kwargs)
        return self._chat.encode(
            values,
            tokens_max,
            cache_scope,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
        )

    def encode_part(self, text: str) -> list[int]:
        return self._encoder.encode(text)

    @property
    def encoder_differences(self) -> int:
        return self._encoder.differences

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def decode_step(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> Callable[[int | list[int]], str | None] | None:
        if self._token_bytes is not None:
            # It takes a third of the library's time.
            step_of_bytes = ByteStep(self._token_bytes[skip_special_tokens])
            return step_of_bytes if step_of_bytes.begins_after(token_ids) else None
        if self.decode(token_ids, skip_special_tokens=skip_special_tokens).endswith(_REPLACEMENT):
            return None
        stream = DecodeStream(token_ids, skip_special_tokens=skip_special_tokens)
        step, tokenizer = stream.step, self._tokenizer
        return lambda tokens: step(tokenizer, tokens)

    def _stop_tokens(
        self, config: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> frozenset[int]:
        generation = _read_json(self._folder, "generation_config.json", required=False)
        stops = _token_ids(generation.get("eos_token_id", _text_field(config, "eos_token_id")))
        own_id = self._tokenizer.token_to_id(special_tokens.get("eos_token", ""))
        return frozenset(stops if own_id is None else (*stops, own_id))


def _token_bytes(
    description: Mapping[str, Any], tokenizer: Any
) -> tuple[TokenBytes, TokenBytes] | None:
    """The bytes of all tokens, and those without special tokens. None unless bytes are all that a token is."""
    if not is_byte_level(description):
        return None
    added: list[dict[str, Any]] = description.get("added_tokens") or []
    special = [token["id"] for token in added if token["special"]]
    return TokenBytes(tokenizer.id_to_token, ()), TokenBytes(tokenizer.id_to_token, special)


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
            raise not_a_model(folder, f"has no {name}" if folder.is_dir() else "does not exist")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise not_a_model(folder, f"has a {name} that cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise not_a_model(folder, f"has a {name} that holds no object")
    return value


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
    for name in SPECIAL_TOKEN_NAMES:
        value = tokenizer_config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _template_source(folder: Path, tokenizer_config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    # Models with images may have it beside the settings of their processor.
    beside = _read_json(folder, "chat_template.json", required=False)
    value = beside.get("chat_template") or tokenizer_config.get("chat_template") or ""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template", "") for entry in value}
        value = named.get("default", "")
    return str(value)
