"""Stands for the logits of a position: bytes derived from the digest of its KV cache. Pure.

Their number is that of a real model with the same vocabulary. Every byte is checked.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from headrace_common.errors import KvCorrupt
from headrace_engine.sim.model.bit_mixer import counted_words, mix_words

_LOGIT_BYTES: Final = 4
_WORD_BYTES: Final = 8
_SEED: Final = 15


def logits_bytes(vocabulary: int) -> int:
    """Bytes of one position's logits."""
    return max(_WORD_BYTES, _LOGIT_BYTES * vocabulary)


def logits_of(digest: int, vocabulary: int) -> bytes:
    """The digest, followed by words derived from it."""
    size = logits_bytes(vocabulary)
    words = mix_words(counted_words(-(-size // _WORD_BYTES), _SEED) ^ np.uint64(digest))
    words[0] = digest
    return words.astype("<u8").tobytes()[:size]


def digest_of(logits: bytes, vocabulary: int) -> int:
    """The digest in some logits. Raises KvCorrupt when any byte is wrong."""
    digest = int.from_bytes(logits[:_WORD_BYTES], "little")
    if logits != logits_of(digest, vocabulary):
        raise KvCorrupt("the logits are not those of any KV cache")
    return digest
