"""A copy from one block to another. Imports no numpy, since small processes make such copies too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Copies `count` pieces of `nbytes` from offset `source` to offset `destination` of two blocks.

    The strides are the bytes from one piece to the next.
    """

    source: int
    destination: int
    nbytes: int
    count: int
    source_stride: int
    destination_stride: int
