"""The names of blocks in a remote pool. Pure.

A name has the layout, the rank, and a keyed hash of the block. The block's own hash covers its tokens, all tokens
before it, and the tenant's cache salt. So blocks of another model, layout, tensor-parallel size or tenant have other
names. Without the deployment's key, a name does not show whether a prompt is in the pool.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from headrace_kv.layout.layout import KvLayout
from headrace_kv.layout.proto import layout_to_proto

_VERSION: Final = 1
"""Of the names, of the order of bytes in a block, and of the seal."""
_LAYOUT_CHARACTERS: Final = 16
_BLOCK_BYTES: Final = 16
_PREFIX_BYTES: Final = 32
# BLAKE2's personalization: no two digests of the deployment's key are equal.
_NAMES: Final = b"poolname"
_SEALS: Final = b"poolseal"


def pool_secret(prefix_hash_key: int) -> bytes:
    """The key of names and seals, from the deployment's key."""
    return prefix_hash_key.to_bytes(8, "little")


class PoolKeys:
    """The names of one layout's blocks."""

    def __init__(self, secret: bytes, layout: KvLayout) -> None:
        # Local broadcast changes no byte of a block.
        message = layout_to_proto(replace(layout, broadcast_width=1))
        digest = hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()
        self._layout = digest[:_LAYOUT_CHARACTERS]
        self._secret = secret
        self.rank_count = layout.rank_count
        """Ranks that each have a part of every block."""

    def of_rank(self, rank: int, prefixes: Iterable[int]) -> list[str]:
        """The names of blocks of one rank, by their hashes of at most 256 bits."""
        shard = f"headrace{_VERSION}-{self._layout}-{rank}.{self.rank_count}"
        return [f"{shard}-{self._digest(prefix)}" for prefix in prefixes]

    def of_all_ranks(self, prefixes: Iterable[int]) -> list[str]:
        """The names of blocks on every rank, rank by rank."""
        known = list(prefixes)
        return [name for rank in range(self.rank_count) for name in self.of_rank(rank, known)]

    def _digest(self, prefix: int) -> str:
        return hashlib.blake2s(
            prefix.to_bytes(_PREFIX_BYTES, "big"),
            digest_size=_BLOCK_BYTES,
            key=self._secret,
            person=_NAMES,
        ).hexdigest()


def seal_secret(secret: bytes) -> bytes:
    """The key of seals, which differs from that of names."""
    return hashlib.blake2s(key=secret, person=_SEALS).digest()
