"""Tokens of conversations: the chat template, with protection against control tokens in the texts of clients."""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from tokenizers import Tokenizer

from headrace_common.errors import ConfigError, InvalidRequest
from headrace_text.chat_template import ChatTemplate, template_values
from headrace_text.codec import ChatMessage, ToolCall, TooManyTokens
from headrace_text.control_tokens import (
    NOTHING_ESCAPED,
    ControlTokens,
    EscapedChat,
    LiteralFinder,
    control_texts,
    texts_in,
)

CACHE_BYTES_MAX: Final = 128 * 1024 * 1024
"""About 170 conversations of 128K tokens."""
# What Python's objects of one entry take beside its content.
_ENTRY_BYTES: Final = 400

PieceKey: TypeAlias = tuple[str, ...]


class _Scope:
    """The entries of one tenant."""

    def __init__(self) -> None:
        self.entries: OrderedDict[PieceKey, array[int]] = OrderedDict()
        """The least recently used first."""
        self.stored_bytes = 0

    def get(self, key: PieceKey) -> array[int] | None:
        tokens = self.entries.get(key)
        if tokens is not None:
            self.entries.move_to_end(key)
        return tokens

    def add(self, key: PieceKey, tokens: array[int]) -> None:
        self.entries[key] = tokens
        self.stored_bytes += _entry_bytes(key, tokens)

    def remove_oldest(self) -> int:
        """Returns its bytes."""
        size = _entry_bytes(*self.entries.popitem(last=False))
        self.stored_bytes -= size
        return size


class PieceCache:
    """Tokens by text, in at most `bytes_max` bytes. Thread-safe.

    Entries of different scopes are different entries: how long a text takes to encode does not show what other tenants
    have sent. Without room, the scope with the most bytes loses its least recently used entry. So no scope loses one
    while it has less than its equal share.
    """

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._scopes: dict[str, _Scope] = {}
        self._bytes = 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of all entries."""
        return self._bytes

    @property
    def entry_count(self) -> int:
        """The number of cached pieces."""
        return sum(len(scope.entries) for scope in self._scopes.values())

    def get(self, scope: str, key: PieceKey) -> array[int] | None:
        """The tokens of a text, which must not be changed."""
        with self._lock:
            found = self._scopes.get(scope)
            return None if found is None else found.get(key)

    def add(self, scope: str, key: PieceKey, tokens: array[int]) -> None:
        """Stores the tokens of a text, unless there are too many."""
        size = _entry_bytes(key, tokens)
        if size > self._bytes_max:
            return
        with self._lock:
            found = self._scopes.setdefault(scope, _Scope())
            if key in found.entries:
                return
            found.add(key, tokens)
            self._bytes += size
            while self._bytes > self._bytes_max:
                self._remove_oldest()

    def _remove_oldest(self) -> None:
        name = max(self._scopes, key=lambda name: self._scopes[name].stored_bytes)
        self._bytes -= self._scopes[name].remove_oldest()
        if not self._scopes[name].entries:
            del self._scopes[name]


def _entry_bytes(key: PieceKey, tokens: array[int]) -> int:
    texts = sum(len(text) if text.isascii() else 4 * len(text) for text in key)
    return texts + len(tokens) * tokens.itemsize + _ENTRY_BYTES


# A shorter run is joined with what follows, and at the end of a text it is not cached.
_RUN_CHARACTERS_MIN: Final = 256

EncodeRun: TypeAlias = Callable[[str, EscapedChat, int | None], list[int]]


class RunEncoder:
    """Encodes the texts of chats as a tokenizer does. It caches runs of a text, so a turn costs what is new in it.

    A text is cut into runs before control tokens. A tokenizer finds them first and encodes the texts between them by
    themselves, so the tokens of the runs are those of the whole.
    """

    def __init__(
        self,
        tokenizer: Any,
        added_tokens: Sequence[Mapping[str, Any]],
        control_texts: Collection[str],
        encode_escaped: EncodeRun,
        cache: PieceCache,
    ) -> None:
        """`added_tokens` are those of tokenizer.json. `encode_escaped` encodes runs with placeholders."""
        self._tokenizer = tokenizer
        self._cuts = LiteralFinder(cut_texts(added_tokens, control_texts))
        self._encode_escaped = encode_escaped
        self._cache = cache

    def encode(
        self, text: str, scope: str, tokens_max: int | None, escaped: EscapedChat = NOTHING_ESCAPED
    ) -> array[int]:
        """The tokens of a text without special tokens around it. Raises TooManyTokens above `tokens_max`.

        `escaped` has the originals of placeholders in the text. `scope`: see PieceCache.
        """
        runs = list(self._runs(text))
        keys = [(run, *escaped.originals_in(run)) for run in runs]
        parts = {
            index: tokens
            for index, key in enumerate(keys)
            if (tokens := self._cache.get(scope, key)) is not None
        }
        missing = [index for index in range(len(runs)) if index not in parts]
        plain = [index for index in missing if not escaped.is_in(runs[index])]
        encodings = dict(
            zip(plain, self._encode_all([runs[index] for index in plain]), strict=True)
        )
        # The lists of tokens are made under the global interpreter lock.
        _check_count(sum(map(len, (*parts.values(), *encodings.values()))), tokens_max)
        for index in missing:
            run, known = runs[index], encodings.get(index)
            ids = self._encode_escaped(run, escaped, tokens_max) if known is None else known.ids
            parts[index] = array("I", ids)
            if len(run) >= _RUN_CHARACTERS_MIN:
                self._cache.add(scope, keys[index], parts[index])
        words = array("I", b"".join(parts[index] for index in range(len(runs))))
        _check_count(len(words), tokens_max)
        return words

    def _encode_all(self, runs: list[str]) -> list[Any]:
        # `encode_batch_fast` releases the global interpreter lock.
        return self._tokenizer.encode_batch_fast(runs, add_special_tokens=False) if runs else []

    def _runs(self, text: str) -> Iterator[str]:
        """The runs depend only on the text before their end, so those of an earlier turn come again."""
        start = 0
        for cut, _ in self._cuts.spans(text):
            if cut - start >= _RUN_CHARACTERS_MIN:
                yield text[start:cut]
                start = cut
        if start < len(text):
            yield text[start:]


def _check_count(count: int, tokens_max: int | None) -> None:
    if tokens_max is not None and count > tokens_max:
        raise TooManyTokens(count)


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


# A text with more characters for each token of the bound is counted in pieces first. English has four to five.
_CHARACTERS_PER_TOKEN = 6
_PIECE_CHARACTERS = 32_768
# Cutting a text changes the number of its tokens by a few at each cut.
_PIECES_SURPLUS = 1.25


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> Any:
    # `encode` keeps the global interpreter lock, and `encode_batch_fast` releases it.
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def reject_far_too_long(tokenizer: Any, texts: Sequence[str], tokens_max: int | None) -> None:
    """Raises TooManyTokens as soon as the first pieces of long texts have far too many tokens."""
    if tokens_max is None:
        return
    if sum(map(len, texts)) <= max(_CHARACTERS_PER_TOKEN * tokens_max, 2 * _PIECE_CHARACTERS):
        return
    text = "\n".join(texts)
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
        image_text: str = "",
    ) -> None:
        """`image_text` is the placeholder for an image, empty for a model without images."""
        self._tokenizer = tokenizer
        self._template = ChatTemplate(source, special_tokens, image_text)
        added: list[dict[str, Any]] = description.get("added_tokens") or []
        texts = control_texts(
            ((token["content"], token["special"]) for token in added), tokenizer, self._frames()
        )
        if image_text:
            texts |= {image_text}
        self._control_tokens = ControlTokens(texts)
        self._control_ids = frozenset(map(tokenizer.token_to_id, texts))
        self._runs = RunEncoder(tokenizer, added, texts, self._encode_escaped, PieceCache())
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
    ) -> array[int]:
        """Tokens of a conversation. `values` are as of `template_values`. Raises InvalidRequest and TooManyTokens.

        `cache_scope`: see PieceCache.
        """
        reject_far_too_long(self._tokenizer, [text for _, text in texts_in(values)], tokens_max)
        escaped = self._control_tokens.escape(values)
        if self._normalizes_control_texts:
            self._check_normalized(escaped.values)
        text = self._template.render(
            escaped.values,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
        )
        # The template contains the special tokens: adding them here would double them.
        return self._runs.encode(text, cache_scope, tokens_max, escaped)

    def _encode_escaped(self, text: str, escaped: EscapedChat, tokens_max: int | None) -> list[int]:
        """Encodes the texts between two control tokens of the template by themselves, as tokenizers do."""
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        least_count = len(encoding) - escaped.placeholder_characters(text)
        _check_count(least_count, tokens_max)
        ids: list[int] = []
        position = 0
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._control_ids:
                ids += self._encode_content(text[position:start], escaped)
                ids.append(token_id)
                position = end
        ids += self._encode_content(text[position:], escaped)
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
