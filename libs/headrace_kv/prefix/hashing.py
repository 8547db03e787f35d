"""Names of prompt prefixes: one 64-bit hash per whole block of token ids, chained over its parents.

A hash is XXH3 over token ids as little-endian u32 with an earlier hash as the seed, at the start the deployment's
secret `root`. Blocks are chained one by one, but the last of every eight, a *station*, is hashed as one piece with the
other seven and seeded by the station before. Stations thus chain by themselves: a lookup that steps from one to the
next hashes an eighth as often, and needs the blocks between only where a match ends.

Equal prefixes get equal hashes in every process of a deployment, and nobody outside can name a prefix or build two that
collide. A collision only misleads routing: engines compare tokens.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from headrace_common.errors import InternalError, InvalidRequest

TokenIds: TypeAlias = (
    "list[int] | tuple[int, ...] | array[int] | bytes | memoryview | NDArray[np.uint32]"
)
"""Token ids as a list or tuple, or, without a copy for each id, as a buffer of little-endian u32."""

CHECKPOINT_BLOCKS: Final = 8

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
        self._stretch = np.dtype(f"V{4 * block_tokens * CHECKPOINT_BLOCKS}")

    def hashes(self, tokens: TokenIds, parent: int | None = None) -> list[int]:
        """One hash per whole block; tokens beyond the last whole block have none.

        `parent` is the station before the first token, None at the start of the prompt.
        """
        return self.lazy(tokens, parent).all()

    def lazy(self, tokens: TokenIds, parent: int | None = None) -> PromptHashes:
        """The same, each computed when somebody looks. `tokens` may not change meanwhile."""
        return PromptHashes(self, tokens, self.root if parent is None else parent)

    def stations(self, words: memoryview | array[int], parent: int) -> list[int]:
        """Hashes of stations from one on, of which `parent` is the one before. `words` hold whole stretches."""
        return _chain(words, self._stretch, parent)

    def between(self, words: memoryview | array[int], parent: int) -> list[int]:
        """Hashes of the blocks after the station `parent`, up to less than the next. `words` hold whole blocks."""
        return _chain(words, self._block, parent)

    def blocks(
        self,
        words: memoryview | array[int],
        positions: slice | list[int],
        parents: Iterable[int],
    ) -> list[int]:
        """Hashes of blocks anywhere among `words`, none of them a station, by the hashes of the blocks before them."""
        parts = np.frombuffer(words, self._block, len(words) // self.block_tokens)
        return list(map(xxh3_64_intdigest, parts[positions].tolist(), parents))


class PromptHashes:
    """A prompt's block hashes, by position, computed when looked at; looking at one computes the stations before."""

    __slots__ = ("_before", "_given", "_hasher", "_words", "block_count", "stations")

    def __init__(self, hasher: PrefixHasher, tokens: TokenIds, before: int) -> None:
        self._hasher = hasher
        self._before = before
        # Ids that did not come as words are converted as far as somebody looks.
        self._given: Sequence[int] = ()
        self._words: memoryview | array[int]
        if isinstance(tokens, list | tuple):
            self._given, self._words = tokens, array("I")
        else:
            self._words = _as_words(tokens)
        self.block_count = (len(self._given) or len(self._words)) // hasher.block_tokens
        self.stations: list[int] = []

    def __len__(self) -> int:
        return self.block_count

    def __getitem__(self, position: int) -> int:
        stretch, offset = divmod(position, CHECKPOINT_BLOCKS)
        if offset == CHECKPOINT_BLOCKS - 1:
            self.reach(stretch + 1)
            return self.stations[stretch]
        size = self._hasher.block_tokens
        end = (position + 1) * size
        words = self._converted(end)[end - (offset + 1) * size : end]
        return self._hasher.between(words, self.before(stretch))[-1]

    def all(self) -> list[int]:
        """Every hash."""
        return self.first(self.block_count)

    def first(self, count: int) -> list[int]:
        """The hashes of the first `count` blocks, no more than there are."""
        hashes = [0] * count
        self.reach(count // CHECKPOINT_BLOCKS)
        hashes[CHECKPOINT_BLOCKS - 1 :: CHECKPOINT_BLOCKS] = self.stations[
            : count // CHECKPOINT_BLOCKS
        ]
        parents = [self._before, *self.stations]
        words = self._converted(count * self._hasher.block_tokens)
        for offset in range(min(CHECKPOINT_BLOCKS - 1, count)):
            positions = slice(offset, count, CHECKPOINT_BLOCKS)
            parents = hashes[positions] = self._hasher.blocks(words, positions, parents)
        return hashes

    def reach(self, station_count: int) -> None:
        """Computes stations up to that many, of those that there are."""
        start = len(self.stations)
        if start < station_count:
            size = self._hasher.block_tokens * CHECKPOINT_BLOCKS
            words = self._converted(station_count * size)
            self.stations += self._hasher.stations(
                words[start * size : station_count * size], self.before(start)
            )

    def before(self, stretch: int) -> int:
        """The station before a stretch, or what stands for one at the start."""
        if not stretch:
            return self._before
        self.reach(stretch)
        return self.stations[stretch - 1]

    def following(self, positions: list[int], parents: Iterable[int]) -> list[int]:
        """The hashes of the blocks at these rising positions, by those of the blocks before them. For no station."""
        words = self._converted((positions[-1] + 1) * self._hasher.block_tokens)
        return self._hasher.blocks(words, positions, parents)

    def _converted(self, count: int) -> memoryview | array[int]:
        """Words, at least that many."""
        words = self._words
        if isinstance(words, array) and len(words) < count:
            words += _packed(self._given[len(words) : count])
        return words


def _chain(words: memoryview | array[int], piece: np.dtype[np.void], parent: int) -> list[int]:
    # A void array's tolist cuts the buffer into bytes objects without a Python step for each.
    return [
        parent := xxh3_64_intdigest(part, parent) for part in np.frombuffer(words, piece).tolist()
    ]


def _as_words(tokens: array[int] | bytes | memoryview | NDArray[np.uint32]) -> memoryview:
    view = memoryview(tokens)  # type: ignore[arg-type] # NumPy says so from 3.12 on
    if view.contiguous and (view.format, view.itemsize) in _FORMATS and view.nbytes % 4 == 0:
        return view.cast("B").cast("I")
    raise InternalError(f"token ids in a buffer of format {view.format!r}, {view.nbytes} bytes")


def _packed(token_ids: Sequence[int]) -> array[int]:
    try:
        return array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest({"token_ids": f"must be integers of 32 bits: {error}"}) from error


# What keeps the fingerprint from being of use for anything else.
_PERSON: Final = b"prefixes"


def prefix_hasher(prefix_hash_key: int, model: str, block_tokens: int) -> PrefixHasher:
    """The hasher of all workers that serve `model`, by the name in the registry, in blocks of `block_tokens`.

    `prefix_hash_key` is the deployment's, as RegisterResponse brings it.
    """
    return PrefixHasher(root_hash(prefix_hash_key, model, block_tokens), block_tokens)


def key_fingerprint(prefix_hash_key: int) -> int:
    """32 bits that tell deployments' keys apart and give none away; 0 for no key."""
    if not prefix_hash_key:
        return 0
    digest = hashlib.blake2s(prefix_hash_key.to_bytes(8, "little"), digest_size=4, person=_PERSON)
    return int.from_bytes(digest.digest(), "little") or 1
