"""The names of blocks in a remote pool. Pure.

A block has an object for each shard of its heads in each pipeline stage. An object's name has the layout, the stage,
the heads, and a keyed hash of the block. The block's own hash covers its tokens, all tokens before it, and the tenant's
cache salt. So blocks of another model, layout or tenant have other names. Workers of another tensor-parallel size have
the same names for the same heads. Without the deployment's key, a name does not show whether a prompt is in the pool.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from headrace_kv.layout.layout import KvLayout
from headrace_kv.layout.proto import layout_to_proto
from headrace_kv.plan.saved_shards import saved_shards

_VERSION: Final = 2
"""Of the names, of the order of bytes in a block, and of the seal."""
_LAYOUT_CHARACTERS: Final = 16
_BLOCK_BYTES: Final = 16
_PREFIX_BYTES: Final = 32
# BLAKE2's personalization: no two digests of the deployment's key are equal.
_NAMES: Final = b"poolname"


def pool_secret(prefix_hash_key: int) -> bytes:
    """The key of names and seals, from the deployment's key."""
    return prefix_hash_key.to_bytes(8, "little")


class PoolKeys:
    """The names of the blocks of one layout."""

    def __init__(self, secret: bytes, layout: KvLayout) -> None:
        # Neither the tensor-parallel size nor local broadcast changes a byte of a head.
        message = layout_to_proto(replace(layout, tensor_parallel_size=1, broadcast_width=1))
        digest = hashlib.sha256(message.SerializeToString(deterministic=True)).hexdigest()
        self._layout = digest[:_LAYOUT_CHARACTERS]
        self._secret = secret
        self.layout = layout
        """The layout of the worker that uses the names."""

    def of_shard(self, stage: int, heads: range, prefixes: Sequence[int]) -> list[str]:
        """The names of one shard of blocks, by their hashes of at most 256 bits."""
        return self._join(stage, heads, self._digests(prefixes))

    def of_blocks(self, shard_count: int, prefixes: Sequence[int]) -> list[str]:
        """The names of all objects of blocks that were saved in `shard_count` shards, shard by shard."""
        digests = self._digests(prefixes)
        return [
            name
            for stage in range(len(self.layout.stage_starts))
            for heads in saved_shards(self.layout.kv_head_count, shard_count)
            for name in self._join(stage, heads, digests)
        ]

    def objects_of(self, shard_count: int) -> int:
        """The number of objects of one block."""
        return len(self.layout.stage_starts) * shard_count

    def _join(self, stage: int, heads: range, digests: list[str]) -> list[str]:
        shard = f"headrace{_VERSION}-{self._layout}-{stage}.{heads.start}.{heads.stop}"
        return [f"{shard}-{digest}" for digest in digests]

    def _digests(self, prefixes: Sequence[int]) -> list[str]:
        return [
            hashlib.blake2s(
                prefix.to_bytes(_PREFIX_BYTES, "big"),
                digest_size=_BLOCK_BYTES,
                key=self._secret,
                person=_NAMES,
            ).hexdigest()
            for prefix in prefixes
        ]
