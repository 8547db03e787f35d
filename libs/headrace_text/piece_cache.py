"""A cache of the tokens of texts, fair among tenants."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from typing import Final, TypeAlias

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
