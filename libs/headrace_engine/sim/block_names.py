"""The names of a request's blocks: in this engine's cache, and in the events for routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from headrace_engine.interface import PromptImage
from headrace_engine.sim.model.bit_mixer import U64Array
from headrace_kv.prefix.hashing import CHECKPOINT_BLOCKS, PrefixHasher, root_hash
from headrace_kv.prefix.images import hashed_token_ids


class BlockNames(Sequence[bytes]):
    """As a sequence: the names of full blocks of `block_tokens`, for a TierPlanner. They become more with `tokens`.

    `hashes` are those of the positions. Only requests with an equal `cache_salt` share cached blocks.
    """

    def __init__(
        self,
        tokens: list[int],
        hashes: U64Array,
        block_tokens: int,
        cache_salt: str = "",
        images: tuple[PromptImage, ...] = (),
    ) -> None:
        self._tokens = tokens
        self._hashes = hashes
        self._block_tokens = block_tokens
        self._cache_salt = cache_salt
        # Distinguishes equal prefixes with different salts. The KV of a token does not depend on the salt.
        self._salt_word = root_hash(0, cache_salt) if cache_salt else 0
        self._images = images
        self._published: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens) // self._block_tokens

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, int):
            return self[index : index + 1][0]
        start, end, _ = index.indices(len(self))
        size = self._block_tokens
        return [self.at(one * size).to_bytes(8, "big") for one in range(start + 1, end + 1)]

    def at(self, end_token: int) -> int:
        """The name in the cache of the block that `end_token` ends."""
        return int(self._hashes[end_token - 1]) ^ self._salt_word

    def prefixes(self, block_tokens: int, token_count: int) -> list[int]:
        """The names in the cache of the full blocks of any size among the first tokens."""
        full = token_count // block_tokens
        ends: U64Array = self._hashes[block_tokens - 1 : full * block_tokens : block_tokens]
        salt_word = self._salt_word
        return [int(value) ^ salt_word for value in ends]

    def published(self, count: int, hasher: PrefixHasher) -> list[int]:
        """The prefix hashes of the first `count` blocks or more, as routers compute them. Do not change."""
        hashes, size = self._published, self._block_tokens
        if len(hashes) < count:
            start = len(hashes) - len(hashes) % CHECKPOINT_BLOCKS
            words = hashed_token_ids(self._tokens, self._images) if self._images else self._tokens
            parent = hashes[start - 1] if start else hasher.root_of(self._cache_salt)
            hashes[start:] = hasher.hashes(words[start * size : count * size], parent)
        return hashes
