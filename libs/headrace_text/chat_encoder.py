"""Tokens of conversations: the chat template, with protection against control tokens in the texts of clients."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

from headrace_common.errors import InvalidRequest
from headrace_text.chat_template import ChatTemplate, template_values
from headrace_text.codec import ChatMessage, ToolCall
from headrace_text.control_tokens import (
    NOTHING_ESCAPED,
    ControlTokens,
    EscapedChat,
    LiteralFinder,
    control_texts,
    texts_in,
)
from headrace_text.encoder import check_count, encode, make_tokenizer, reject_far_too_long
from headrace_text.parsing.detection import PROBE_TOOL, find_reasoning_parser, find_tool_call_parser

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
        encode: Callable[[str], list[int]],
        added_tokens: Sequence[Mapping[str, Any]],
        control_texts: Collection[str],
        encode_escaped: EncodeRun,
        cache: PieceCache,
    ) -> None:
        """`added_tokens` are those of tokenizer.json. `encode_escaped` encodes runs with placeholders."""
        self._encode = encode
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
        for index in missing:
            run, is_plain = runs[index], not escaped.is_in(runs[index])
            ids = self._encode(run) if is_plain else self._encode_escaped(run, escaped, tokens_max)
            parts[index] = array("I", ids)
        check_count(sum(map(len, parts.values())), tokens_max)
        for index in missing:
            if len(runs[index]) >= _RUN_CHARACTERS_MIN:
                self._cache.add(scope, keys[index], parts[index])
        return array("I", b"".join(parts[index] for index in range(len(runs))))

    def _runs(self, text: str) -> Iterator[str]:
        """The runs depend only on the text before their end, so those of an earlier turn come again."""
        start = 0
        for cut, _ in self._cuts.spans(text):
            if cut - start >= _RUN_CHARACTERS_MIN:
                yield text[start:cut]
                start = cut
        if start < len(text):
            yield text[start:]


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
        encode_text: Callable[[str], list[int]],
        source: str,
        special_tokens: Mapping[str, str],
        image_text: str = "",
    ) -> None:
        """`encode_text` encodes as `tokenizer` does. `image_text` is the placeholder for an image, or empty."""
        self._tokenizer = tokenizer
        self._template = ChatTemplate(source, special_tokens, image_text)
        self.tool_call_parser = find_tool_call_parser(self._render_probe)
        self.reasoning_parser = find_reasoning_parser(source, self._render_probe)
        added: list[dict[str, Any]] = description.get("added_tokens") or []
        texts = control_texts(
            ((token["content"], token["special"]) for token in added), tokenizer, self._frames()
        )
        if image_text:
            texts |= {image_text}
        self._control_tokens = ControlTokens(texts)
        self._control_ids = frozenset(map(tokenizer.token_to_id, texts))
        self._runs = RunEncoder(encode_text, added, texts, self._encode_escaped, PieceCache())
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

    def _render_probe(
        self, messages: Sequence[ChatMessage], variables: Mapping[str, Any], begins: bool
    ) -> str:
        return self._template.render(
            template_values(messages, [PROBE_TOOL], variables),
            continue_final_message=False,
            add_generation_prompt=begins,
        )

    def _encode_escaped(self, text: str, escaped: EscapedChat, tokens_max: int | None) -> list[int]:
        """Encodes the texts between two control tokens of the template by themselves, as tokenizers do."""
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
        least_count = len(encoding) - escaped.placeholder_characters(text)
        check_count(least_count, tokens_max)
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
