"""The sim model's caches per token and states per request, as data. Pure.

A cache is the group of a worker with blocks of one token. A unit of its parts is one head of one token, or of one
request's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Final

import numpy as np

from headrace_kv.layout import STATE, TOKEN_OUTER, CacheGroup, GroupKind, Part

TOKEN_INNER: Final = "token_inner"
"""An opaque block_format: tokens are the innermost dimension, so no token is contiguous."""


def word_of(part: Part) -> np.dtype[np.unsignedinteger]:
    """The widest unsigned integer that divides a part."""
    return np.dtype(f"u{gcd(8, part.unit_bytes)}")


def with_blocks(cache: CacheGroup, block_tokens: int, block_format: str) -> CacheGroup:
    """The group of a worker with blocks of `block_tokens`. A state ignores both arguments."""
    if cache.kind == STATE:
        return cache
    tokens = 1 if block_format == TOKEN_OUTER else block_tokens
    parts = tuple(
        replace(part, unit_bytes=part.unit_bytes * tokens, block_format=block_format)
        for part in cache.parts
    )
    return replace(cache, block_tokens=block_tokens, parts=parts)


def spread_caches(
    kinds: Sequence[tuple[str, GroupKind, int, int, tuple[Part, ...]]],
) -> tuple[CacheGroup, ...]:
    """Caches of (name, kind, layer count, heads, parts), with the layers of all kinds alternating evenly.

    Kinds without layers are omitted.
    """
    turns = sorted(
        ((2 * index + 1) / count, number)
        for number, (_, _, count, _, _) in enumerate(kinds)
        for index in range(count)
    )
    return tuple(
        CacheGroup(
            name,
            tuple(layer for layer, (_, owner) in enumerate(turns) if owner == number),
            kind,
            heads,
            0 if kind == STATE else 1,
            parts,
        )
        for number, (name, kind, count, heads, parts) in enumerate(kinds)
        if count
    )
