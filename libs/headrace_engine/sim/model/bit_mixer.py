"""Mixes the bits of 64-bit words. Bijective, so any change of the input changes the output."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64Array = NDArray[np.uint64]

WORD_MASK = (1 << 64) - 1
_FIRST = 0x9E6C63D0876A9A35
_SECOND = 0xC4D1F2B7A3E85D6B
_HALF = np.uint64(32)
_SKEW = np.uint64(29)
_FIRST_WORD = np.uint64(_FIRST)
_SECOND_WORD = np.uint64(_SECOND)


def mix_words(values: U64Array) -> U64Array:
    """Mixes every word of an array of at least one dimension."""
    mixed = values ^ (values >> _HALF)
    mixed *= _FIRST_WORD
    mixed ^= mixed >> _SKEW
    mixed *= _SECOND_WORD
    mixed ^= mixed >> _HALF
    return mixed


def mix_int(value: int) -> int:
    """`mix_words` of one word."""
    value &= WORD_MASK
    value ^= value >> 32
    value = value * _FIRST & WORD_MASK
    value ^= value >> 29
    value = value * _SECOND & WORD_MASK
    return value ^ (value >> 32)


def counted_words(count: int, seed: int, start: int = 0) -> U64Array:
    """Words `start` to `start + count` of the pseudo-random series of `seed`."""
    index = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    return mix_words(index * np.uint64(mix_int(seed) | 1) + np.uint64(mix_int(seed ^ WORD_MASK)))
