"""One stretch of memory per rank, for all of its KV: registered once, aligned as a whole."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace_common.errors import ConfigError

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * 1024 * 1024


def suited_alignment_bytes(nbytes: int) -> int:
    """Huge pages for arenas that fill some, pages for others, so that little is wasted either way."""
    return HUGE_PAGE_BYTES if nbytes >= 8 * HUGE_PAGE_BYTES else PAGE_BYTES


def padding_bytes(address: int, alignment_bytes: int) -> int:
    """Bytes from `address` to the next multiple of the alignment, fewer than one unit of it."""
    return -address % alignment_bytes


def allocate_arena(nbytes: int, alignment_bytes: int) -> NDArray[np.uint8]:
    """Memory of shape [nbytes] that starts at a multiple of the alignment; what it holds is undefined.

    At most one unit of the alignment is allocated beside it. Raises ConfigError unless the alignment is a power of two
    and `nbytes` is positive.
    """
    if nbytes <= 0:
        raise ConfigError(f"an arena cannot have {nbytes} bytes")
    if alignment_bytes <= 0 or alignment_bytes & (alignment_bytes - 1):
        raise ConfigError(f"an alignment is a power of two, not {alignment_bytes}")
    raw = np.empty(nbytes + alignment_bytes - 1, np.uint8)
    skipped = padding_bytes(int(raw.ctypes.data), alignment_bytes)
    return raw[skipped : skipped + nbytes]
