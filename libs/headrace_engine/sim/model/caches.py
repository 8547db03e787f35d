"""The sim model's caches per token and states per request, as data. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Final

import numpy as np

from headrace_kv.layout import STATE, TOKEN_OUTER, CacheGroup, GroupKind, Part

TOKEN_INNER: Final = "token_inner"
"""An opaque block_format: tokens are the innermost dimension, so no token is contiguous."""


@dataclass(frozen=True, slots=True)
class SimPart:
    """One array of a cache: `nbytes` for one head of one token, or of one request's state."""

    name: str
    nbytes: int
    dtype: str = "uint8"

    @property
    def word(self) -> np.dtype[np.unsignedinteger]:
        """The widest unsigned integer that divides it."""
        return np.dtype(f"u{gcd(8, self.nbytes)}")

    @property
    def word_count(self) -> int:
        """Words of one head."""
        return self.nbytes // self.word.itemsize


@dataclass(frozen=True, slots=True)
class SimCache:
    """The part of a cache group that does not depend on the worker."""

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    heads: int
    parts: tuple[SimPart, ...]

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token, or of one state, over all parts."""
        return sum(part.nbytes for part in self.parts)

    def group(self, block_tokens: int, block_format: str) -> CacheGroup:
        """The group of a worker with blocks of `block_tokens`. A state ignores both arguments."""
        is_state = self.kind == STATE
        block_format = TOKEN_OUTER if is_state else block_format
        tokens = 1 if block_format == TOKEN_OUTER else block_tokens
        return CacheGroup(
            name=self.name,
            layers=self.layers,
            kind=self.kind,
            head_count=self.heads,
            block_tokens=0 if is_state else block_tokens,
            parts=tuple(
                Part(part.name, part.dtype, part.nbytes * tokens, block_format)
                for part in self.parts
            ),
        )


def spread_caches(
    kinds: Sequence[tuple[str, GroupKind, int, int, tuple[SimPart, ...]]],
) -> tuple[SimCache, ...]:
    """Caches of (name, kind, layer count, heads, parts), with the layers of all kinds alternating evenly.

    Kinds without layers are omitted.
    """
    turns = sorted(
        ((2 * index + 1) / count, number)
        for number, (_, _, count, _, _) in enumerate(kinds)
        for index in range(count)
    )
    return tuple(
        SimCache(
            name=name,
            kind=kind,
            layers=tuple(layer for layer, (_, owner) in enumerate(turns) if owner == number),
            heads=heads,
            parts=parts,
        )
        for number, (name, kind, count, heads, parts) in enumerate(kinds)
        if count
    )
