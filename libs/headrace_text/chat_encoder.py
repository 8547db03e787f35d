"""Tokens of conversations: the chat template, with protection against control tokens in the texts of clients."""

from __future__ import annotations

import json
import os
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from headrace_common.errors import ConfigError, InvalidRequest
from headrace_text.chat_template import ChatTemplate, template_values
from headrace_text.codec import ChatMessage, ToolCall, TooManyTokens
from headrace_text.control_tokens import ControlTokens, EscapedChat, control_texts, texts_in

CACHE_BYTES_MAX: Final = 16 * 1024 * 1024
# Shorter pieces are encoded again, together: looking them up one by one costs as much.
_PIECE_CHARACTERS_MIN: Final = 256
# What Python's objects of one entry take beside its content.
_ENTRY_BYTES: Final = 400


class PieceCache:
    """Encodes the texts of chats as a tokenizer does, with a cache of at most `bytes_max` bytes. Thread-safe.

    A text is cut before control tokens. A tokenizer finds them first and encodes the texts between them by themselves,
    so the tokens of the pieces are those of the whole. Entries of different scopes are different entries: how long a
    text takes to encode does not show what other tenants have sent.
    """

    def __init__(
        self,
        tokenizer: Any,
        added_tokens: Sequence[Mapping[str, Any]],
        control_texts: Collection[str],
        *,
        bytes_max: int = CACHE_BYTES_MAX,
    ) -> None:
        """`added_tokens` are those of tokenizer.json."""
        self._tokenizer = tokenizer
        self._bytes_max = bytes_max
        cuts = cut_texts(added_tokens, control_texts)
        self._cut = re.compile("|".join(map(re.escape, cuts))) if cuts else None
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._bytes = 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of all entries."""
        return self._bytes

    @property
    def entry_count(self) -> int:
        """The number of cached pieces."""
        return len(self._entries)

    def encode(self, text: str, scope: str, tokens_max: int | None) -> list[int]:
        """The tokens of a text without special tokens around it. Raises TooManyTokens above `tokens_max`."""
        runs = list(self._runs(text))
        found = [self._get(scope, run) for run in runs]
        missing = [run for run, tokens in zip(runs, found, strict=True) if tokens is None]
        # `encode_batch_fast` releases the global interpreter lock.
        encodings = iter(
            self._tokenizer.encode_batch_fast(missing, add_special_tokens=False) if missing else ()
        )
        parts: list[Any] = [next(encodings) if tokens is None else tokens for tokens in found]
        count = sum(map(len, parts))
        if tokens_max is not None and count > tokens_max:
            raise TooManyTokens(count)
        ids: list[int] = []
        for run, tokens, part in zip(runs, found, parts, strict=True):
            if tokens is None:
                own = part.ids
                self._add(scope, run, own)
                ids += own
            else:
                ids += tokens
        return ids

    def _runs(self, text: str) -> Iterator[str]:
        """The long pieces, and what is between them."""
        start = run_start = 0
        for end in (*self._cuts(text), len(text)):
            if end - start >= _PIECE_CHARACTERS_MIN:
                if run_start < start:
                    yield text[run_start:start]
                yield text[start:end]
                run_start = end
            start = end
        if run_start < len(text):
            yield text[run_start:]

    def _cuts(self, text: str) -> list[int]:
        return [found.start() for found in self._cut.finditer(text)] if self._cut else []

    def _get(self, scope: str, run: str) -> array[int] | None:
        if len(run) < _PIECE_CHARACTERS_MIN:
            return None
        with self._lock:
            tokens = self._entries.get((scope, run))
            if tokens is not None:
                self._entries.move_to_end((scope, run))
            return tokens

    def _add(self, scope: str, run: str, ids: list[int]) -> None:
        if len(run) < _PIECE_CHARACTERS_MIN:
            return
        tokens = array("I", ids)
        size = _entry_bytes(scope, run, tokens)
        if size > self._bytes_max:
            return
        with self._lock:
            if (scope, run) in self._entries:
                return
            self._entries[scope, run] = tokens
            self._bytes += size
            while self._bytes > self._bytes_max:
                (old_scope, old_run), old = self._entries.popitem(last=False)
                self._bytes -= _entry_bytes(old_scope, old_run, old)


def cut_texts(
    added_tokens: Sequence[Mapping[str, Any]], control_texts: Collection[str]
) -> tuple[str, ...]:
    """The control texts before which a text can be cut. The longest first.

    The tokenizer must find such a text wherever it stands, and no token may reach over its beginning.
    """
    texts = [token["content"] for token in added_tokens]
    # A token with `normalized` is found in the normalized pieces between the others.
    plain = {
        token["content"]
        for token in added_tokens
        if not (token["lstrip"] or token["single_word"] or token["normalized"])
    }
    fit = [
        text
        for text in plain.intersection(control_texts)
        if not any(_reaches_into(other, text) for other in texts)
    ]
    return tuple(sorted(fit, key=lambda text: (-len(text), text)))


def _reaches_into(other: str, text: str) -> bool:
    """Whether an occurrence of `other` can begin before one of `text` and end within or behind it."""
    return any(
        other[start:].startswith(text) or text.startswith(other[start:])
        for start in range(1, len(other))
    )


def _entry_bytes(scope: str, run: str, tokens: array[int]) -> int:
    characters = len(run) if run.isascii() else 4 * len(run)
    return characters + len(scope) + len(tokens) * tokens.itemsize + _ENTRY_BYTES


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


_NO_TEXT = (
    "has the text of a control token, which this model's tokenizer cannot encode as text; remove it"
)
_ANY_TOOL = {
    "type": "function",
    "function": {
        "name": "x",
        "description": "x",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": []},
    },
}


class ChatEncoder:
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
        self._pieces = PieceCache(tokenizer, added, texts)
        # With this switch a tokenizer treats special tokens as text. Here these are the control tokens.
        tokens = [{**token, "special": token["content"] in texts} for token in added]
        self._plain = make_tokenizer(folder, {**description, "added_tokens": tokens})
        self._plain.encode_special_tokens = True
        self._normalizes_control_texts = description.get("normalizer") is not None and any(
            token["normalized"] for token in added if token["content"] in texts
        )

    def encode(
        self,
        values: Mapping[str, Any],
        tokens_max: int | None,
        cache_scope: str,
        *,
        continue_final_message: bool,
        add_generation_prompt: bool,
    ) -> list[int]:
        """Tokens of a conversation. `values` are as of `template_values`. Raises InvalidRequest and TooManyTokens.

        `cache_scope`: see PieceCache.
        """
        texts = "\n".join(text for _, text in texts_in(values))
        reject_far_too_long(self._tokenizer, texts, tokens_max)
        escaped = self._control_tokens.escape(values)
        if self._normalizes_control_texts:
            self._check_normalized(escaped.values)
        text = self._template.render(
            escaped.values,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
        )
        # The template contains the special tokens: adding them here would double them.
        if escaped.originals:
            return self._encode_escaped(text, escaped, tokens_max)
        return self._pieces.encode(text, cache_scope, tokens_max)

    def _encode_escaped(self, text: str, escaped: EscapedChat, tokens_max: int | None) -> list[int]:
        """Encodes the texts between two control tokens of the template by themselves, as tokenizers do."""
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        least_count = len(encoding) - escaped.placeholder_characters(text)
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
        ids: list[int] = encode(self._plain, escaped.restore(text)).ids
        if not self._control_ids.isdisjoint(ids):
            raise InvalidRequest({"chat.messages": _NO_TEXT})
        return ids

    def _check_normalized(self, values: Mapping[str, Any]) -> None:
        """Raises InvalidRequest for a text that becomes a control text only when it is normalized."""
        for path, text in texts_in(values):
            if not self._control_ids.isdisjoint(encode(self._tokenizer, text).ids):
                raise InvalidRequest({path: _NO_TEXT})

    def _frames(self) -> Iterator[str]:
        for roles in (("user",), ("system", "user", "assistant", "user")):
            yield from self._frame(template_values([ChatMessage(role, "x") for role in roles]))
        call = ChatMessage("assistant", "", tool_calls=(ToolCall("x", "x", {"x": "x"}),))
        result = ChatMessage("tool", "x", name="x", tool_call_id="x")
        yield from self._frame(
            template_values([ChatMessage("user", "x"), call, result], [_ANY_TOOL])
        )

    def _frame(self, values: Mapping[str, Any]) -> Iterator[str]:
        # Some templates reject system messages or tools.
        with suppress(InvalidRequest):
            yield self._template.render(values, continue_final_message=False)
