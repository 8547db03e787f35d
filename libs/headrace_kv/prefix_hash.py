"""Names of prompt prefixes: one 64-bit hash per whole block of token ids, chained over its parents.

A hash is XXH3 over token ids as little-endian u32 with an earlier hash as the seed, at the start the deployment's
secret `root`. Blocks are chained one by one, but the last of every eight, a *station*, is hashed as one piece with the
other seven and seeded by the station before. Stations thus chain by themselves: a lookup that steps from one to the
next hashes an eighth as often, and needs the blocks between only where a match ends.

Equal prefixes get equal hashes in every process of a deployment, and nobody outside can name a prefix or build two that
collide. A collision only misleads routing: engines compare tokens.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from headrace_common.errors import InternalError, InvalidRequest

TokenIds: TypeAlias = (
    "list[int] | tuple[int, ...] | array[int] | bytes | memoryview | NDArray[np.uint32]"
)
"""Token ids as a list or tuple, or, without a copy for each id, as a buffer of little-endian u32."""

STATION_BLOCKS: Final = 8

_FORMATS: Final = {("B", 1), ("I", 4), ("i", 4), ("L", 4), ("l", 4)}

assert sys.byteorder == "little", "token ids and hashes travel as little-endian words"


def root_hash(secret: int, *scope: str | int) -> int:
    """The seed of first blocks: `secret` is the deployment's; equal prefixes of other scopes get other hashes.

    Scope is whatever keeps caches apart, in a fixed order: model, block size, adapter.
    """
    named = "".join(f"{len(str(part))}:{part}" for part in scope)
    return xxh3_64_intdigest(named.encode(), secret & 0xFFFF_FFFF_FFFF_FFFF)


class PrefixHasher:
    """Hashes the prompts of one scope. Immutable."""

    __slots__ = ("_block", "_stretch", "block_tokens", "root")

    def __init__(self, root: int, block_tokens: int) -> None:
        if block_tokens < 1:
            raise InternalError(f"a block of {block_tokens} tokens")
        self.root = root
        self.block_tokens = block_tokens
        self._block = np.dtype(f"V{4 * block_tokens}")
        self._stretch = np.dtype(f"V{4 * block_tokens * STATION_BLOCKS}")

    def hashes(self, tokens: TokenIds, parent: int | None = None) -> list[int]:
        """One hash per whole block; tokens beyond the last whole block have none.

        `parent` is the station before the first token, None at the start of the prompt.
        """
        return self.lazy(tokens, parent).all()

    def lazy(self, tokens: TokenIds, parent: int | None = None) -> PromptHashes:
        """The same, each computed when somebody looks. `tokens` may not change meanwhile."""
        return PromptHashes(self, tokens, self.root if parent is None else parent)

    def chain_blocks(self, words: memoryview | bytes, parent: int) -> list[int]:
        """Hashes of blocks one by one. Shape of `words` [blocks, 4 * block_tokens] bytes."""
        return _chain(words, self._block, parent)

    def chain_stations(self, words: memoryview | bytes, parent: int) -> list[int]:
        """Hashes of stations. Shape of `words` [stations, 4 * block_tokens * STATION_BLOCKS] bytes."""
        return _chain(words, self._stretch, parent)


class PromptHashes:
    """A prompt's block hashes, by position, computed when looked at; looking at one computes the stations before."""

    __slots__ = ("_before", "_between", "_hasher", "_tokens", "block_count", "stations")

    def __init__(self, hasher: PrefixHasher, tokens: TokenIds, before: int) -> None:
        self._hasher = hasher
        self._before = before
        self._tokens = _as_words(tokens)
        self._between: dict[int, list[int]] = {}
        self.block_count = len(self._tokens) // hasher.block_tokens
        self.stations: list[int] = []

    def __len__(self) -> int:
        return self.block_count

    def __getitem__(self, position: int) -> int:
        stretch, offset = divmod(position, STATION_BLOCKS)
        if offset == STATION_BLOCKS - 1:
            if stretch >= len(self.stations):
                self._reach(stretch + 1)
            return self.stations[stretch]
        return self._between_of(stretch)[offset]

    def all(self) -> list[int]:
        """Every hash."""
        return self.first(self.block_count)

    def first(self, count: int) -> list[int]:
        """The hashes of the first `count` blocks, no more than there are."""
        whole, rest = divmod(count, STATION_BLOCKS)
        self._reach(whole)
        hashes: list[int] = []
        for stretch in range(whole):
            hashes += self._between_of(stretch)
            hashes.append(self.stations[stretch])
        return hashes + self._between_of(whole)[:rest] if rest else hashes

    def _between_of(self, stretch: int) -> list[int]:
        between = self._between.get(stretch)
        if between is None:
            between = self._between[stretch] = self._hash_between(stretch)
        return between

    def _reach(self, station_count: int) -> None:
        """Computes stations up to that many."""
        size = self._hasher.block_tokens * STATION_BLOCKS
        start = len(self.stations)
        if start < station_count:
            words = _word_bytes(self._tokens, start * size, station_count * size)
            self.stations += self._hasher.chain_stations(words, self._station_before(start))

    def _hash_between(self, stretch: int) -> list[int]:
        """Of the blocks after a station up to the next, less that."""
        size = self._hasher.block_tokens
        start = stretch * STATION_BLOCKS
        end = min(start + STATION_BLOCKS - 1, self.block_count)
        if stretch > len(self.stations):
            self._reach(stretch)
        words = _word_bytes(self._tokens, start * size, end * size)
        return self._hasher.chain_blocks(words, self._station_before(stretch))

    def _station_before(self, stretch: int) -> int:
        return self.stations[stretch - 1] if stretch else self._before


def _chain(words: memoryview | bytes, piece: np.dtype[np.void], parent: int) -> list[int]:
    # A void array's tolist cuts the buffer into bytes objects without a Python step for each.
    return [
        parent := xxh3_64_intdigest(part, parent) for part in np.frombuffer(words, piece).tolist()
    ]


def _as_words(tokens: TokenIds) -> Sequence[int] | memoryview:
    """Something whose length and slices count token ids."""
    if isinstance(tokens, list | tuple):
        return tokens
    view = memoryview(tokens)  # type: ignore[arg-type] # NumPy says so from 3.12 on
    if view.contiguous and (view.format, view.itemsize) in _FORMATS and view.nbytes % 4 == 0:
        return view.cast("B").cast("I")
    raise InternalError(f"token ids in a buffer of format {view.format!r}, {view.nbytes} bytes")


def _word_bytes(words: Sequence[int] | memoryview, start: int, end: int) -> memoryview | bytes:
    if isinstance(words, memoryview):
        return words[start:end]
    try:
        return memoryview(array("I", words[start:end]))
    except (OverflowError, TypeError) as error:
        raise InvalidRequest({"token_ids": f"must be integers of 32 bits: {error}"}) from error
