"""Tokens of the pieces of chats that repeat, such as system prompts and earlier turns."""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from headrace_text.codec import TooManyTokens

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
