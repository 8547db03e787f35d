"""Hashes of prompt prefixes: one 64-bit hash for each whole block of token ids, chained over its parents.

A hash is the XXH3 of token ids as little-endian u32. Its seed is an earlier hash, or for the first block the secret
`root` of the deployment. Each block is seeded by the block before it, except for the last of every eight blocks, the
*checkpoint*. All eight blocks of such a segment are hashed as one piece, seeded by the previous checkpoint.

So checkpoints chain by themselves. A lookup along checkpoints computes an eighth of the hashes, and needs the blocks in
between only where a match ends.

Equal prefixes get equal hashes in every process of a deployment. Without the secret nothing can compute the hash of a
prefix, nor construct two prefixes that collide. A collision only misleads routing, because engines compare tokens.

The first block of a prompt with a cache salt is seeded by `PrefixHasher.root_of` the salt. So its hashes differ from
those of the same tokens with another salt.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from headrace_common.errors import InternalError, InvalidRequest

TokenIds: TypeAlias = (
    "list[int] | tuple[int, ...] | array[int] | bytes | memoryview | NDArray[np.uint32]"
)
"""Token ids as a list or tuple, or as a buffer of little-endian u32. A buffer saves a copy of each id."""

CHECKPOINT_BLOCKS: Final = 8

_FORMATS: Final = {("B", 1), ("I", 4), ("i", 4), ("L", 4), ("l", 4)}

assert sys.byteorder == "little", "token ids and hashes travel as little-endian words"


def root_hash(secret: int, *scope: str | int) -> int:
    """The seed of first blocks, from the deployment's `secret`. Equal prefixes of two scopes get different hashes.

    A scope separates caches by model, block size and adapter, in this order.
    """
    named = "".join(f"{len(str(part))}:{part}" for part in scope)
    return xxh3_64_intdigest(named.encode(), secret & 0xFFFF_FFFF_FFFF_FFFF)


class PrefixHasher:
    """Hashes the prompts of one scope. Immutable."""

    __slots__ = ("_block", "_segment", "block_tokens", "root")

    def __init__(self, root: int, block_tokens: int) -> None:
        if block_tokens < 1:
            raise InternalError(f"a block of {block_tokens} tokens")
        self.root = root
        self.block_tokens = block_tokens
        self._block = np.dtype(f"V{4 * block_tokens}")
        self._segment = np.dtype(f"V{4 * block_tokens * CHECKPOINT_BLOCKS}")

    def root_of(self, cache_salt: str) -> int:
        """The seed of first blocks of prompts with this salt. It is `root` for the empty salt."""
        return root_hash(self.root, cache_salt) if cache_salt else self.root

    def hashes(self, tokens: TokenIds, parent: int | None = None) -> list[int]:
        """One hash per whole block. Tokens beyond the last whole block have none.

        `parent` is the checkpoint before the first token. At the start of the prompt it is `root_of` its salt, or None
        for a prompt without a salt.
        """
        return self.lazy(tokens, parent)[:]

    def lazy(self, tokens: TokenIds, parent: int | None = None) -> PromptHashes:
        """The same hashes, each computed on first use. `tokens` may not change meanwhile."""
        return PromptHashes(self, tokens, self.root if parent is None else parent)

    def checkpoint_hashes(self, words: memoryview | array[int], parent: int) -> list[int]:
        """Hashes of consecutive checkpoints after the checkpoint `parent`. `words` hold whole segments."""
        return _chain(words, self._segment, parent)

    def block_hashes(self, words: memoryview | array[int], parent: int) -> list[int]:
        """Hashes of consecutive blocks after the checkpoint `parent`, before the next. `words` hold whole blocks."""
        return _chain(words, self._block, parent)

    def hashes_at(
        self,
        words: memoryview | array[int],
        positions: slice,
        parents: Iterable[int],
    ) -> list[int]:
        """Hashes of the blocks at these positions of `words`, given those of the blocks before. For no checkpoint."""
        parts = np.frombuffer(words, self._block, len(words) // self.block_tokens)
        return list(map(xxh3_64_intdigest, parts[positions].tolist(), parents))


class PromptHashes:
    """The block hashes of a prompt by position, computed on first use. A hash needs all checkpoints before it."""

    __slots__ = ("_given", "_hasher", "_parent", "_words", "block_count", "checkpoints")

    def __init__(self, hasher: PrefixHasher, tokens: TokenIds, parent: int) -> None:
        self._hasher = hasher
        self._parent = parent
        # Ids in a list or tuple are converted to words only as far as they are needed.
        self._given: Sequence[int] = ()
        self._words: memoryview | array[int]
        if isinstance(tokens, list | tuple):
            self._given, self._words = tokens, array("I")
        else:
            self._words = _as_words(tokens)
        self.block_count = (len(self._given) or len(self._words)) // hasher.block_tokens
        self.checkpoints: list[int] = []

    def __len__(self) -> int:
        return self.block_count

    @overload
    def __getitem__(self, position: int) -> int: ...

    @overload
    def __getitem__(self, position: slice) -> list[int]: ...

    def __getitem__(self, position: int | slice) -> int | list[int]:
        """The hash of one block, or those of consecutive blocks."""
        if isinstance(position, slice):
            start, stop, _ = position.indices(self.block_count)
            return self._between(start, stop)
        segment, offset = divmod(position, CHECKPOINT_BLOCKS)
        if offset == CHECKPOINT_BLOCKS - 1:
            return self._checkpoint(segment + 1)
        return self._between(position, position + 1)[0]

    def _checkpoint(self, count: int) -> int:
        """The last of the first `count` checkpoints, or for none the parent of the prompt."""
        start = len(self.checkpoints)
        if start < count:
            size = self._hasher.block_tokens * CHECKPOINT_BLOCKS
            words = self._words_to(count * size)[start * size : count * size]
            self.checkpoints += self._hasher.checkpoint_hashes(words, self._checkpoint(start))
        return self.checkpoints[count - 1] if count else self._parent

    def _between(self, start: int, stop: int) -> list[int]:
        """The hashes of the blocks from `start` to before `stop`, from the start of a segment on."""
        segment, offset = divmod(start, CHECKPOINT_BLOCKS)
        size, first = self._hasher.block_tokens, start - offset
        words = self._words_to(stop * size)[first * size : stop * size]
        if stop - first < CHECKPOINT_BLOCKS:
            return self._hasher.block_hashes(words, self._checkpoint(segment))[offset:]
        last = stop // CHECKPOINT_BLOCKS
        self._checkpoint(last)
        hashes = [0] * (stop - first)
        hashes[CHECKPOINT_BLOCKS - 1 :: CHECKPOINT_BLOCKS] = self.checkpoints[segment:last]
        parents = [self._checkpoint(segment), *self.checkpoints[segment:last]]
        for place in range(CHECKPOINT_BLOCKS - 1):
            positions = slice(place, None, CHECKPOINT_BLOCKS)
            parents = hashes[positions] = self._hasher.hashes_at(words, positions, parents)
        return hashes[offset:]

    def _words_to(self, count: int) -> memoryview | array[int]:
        """At least the first `count` words."""
        words = self._words
        if isinstance(words, array) and len(words) < count:
            words += _packed(self._given[len(words) : count])
        return words


def _chain(words: memoryview | array[int], piece: np.dtype[np.void], parent: int) -> list[int]:
    # The tolist of a void array makes the bytes objects without a Python step for each.
    return [
        parent := xxh3_64_intdigest(part, parent) for part in np.frombuffer(words, piece).tolist()
    ]


def _as_words(tokens: array[int] | bytes | memoryview | NDArray[np.uint32]) -> memoryview:
    view = memoryview(tokens)  # type: ignore[arg-type] # NumPy has the type from Python 3.12 on
    if view.contiguous and (view.format, view.itemsize) in _FORMATS and view.nbytes % 4 == 0:
        return view.cast("B").cast("I")
    raise InternalError(f"token ids in a buffer of format {view.format!r}, {view.nbytes} bytes")


def _packed(token_ids: Sequence[int]) -> array[int]:
    try:
        return array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest({"token_ids": f"must be integers of 32 bits: {error}"}) from error


# BLAKE2's personalization: the fingerprint equals no other digest of the key.
_PERSON: Final = b"prefixes"


def prefix_hasher(prefix_hash_key: int, model: str, block_tokens: int) -> PrefixHasher:
    """The hasher of all workers that serve `model` in blocks of `block_tokens`. `model` is its name in the registry.

    `prefix_hash_key` is the deployment's key from RegisterResponse.
    """
    return PrefixHasher(root_hash(prefix_hash_key, model, block_tokens), block_tokens)


def key_fingerprint(prefix_hash_key: int) -> int:
    """32 bits that distinguish the keys of deployments and reveal none. 0 for no key."""
    if not prefix_hash_key:
        return 0
    digest = hashlib.blake2s(prefix_hash_key.to_bytes(8, "little"), digest_size=4, person=_PERSON)
    return int.from_bytes(digest.digest(), "little") or 1
