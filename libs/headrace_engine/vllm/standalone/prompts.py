"""Whether two engines mean the same prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash


def prompt_digest(token_ids: Sequence[int], extras: Sequence[str]) -> int:
    """64 bits over tokens and whatever else decides their KV cache, such as an adapter's name."""
    digest = xxhash.xxh3_64(np.asarray(token_ids, dtype=np.int64).tobytes())
    for extra in extras:
        digest.update(b"\0" + extra.encode())
    return digest.intdigest()
