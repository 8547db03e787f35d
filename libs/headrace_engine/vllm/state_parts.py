"""Divides a rank's page of a state into arrays with heads, so that ranks of another number can hold them. Pure.

A page has the last inputs of a convolution, then a recurrent state for each head. The inputs are channels of several
kinds, such as queries, keys and values. Each rank has its heads of each kind, in this order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

GATED_DELTA_NET: Final = "gdn_attn"
MAMBA2: Final = "mamba2"
SHORT_CONVOLUTION: Final = "short_conv"
DIVIDED_KINDS: Final = (SHORT_CONVOLUTION,)
"""Kinds that were run with vLLM between different numbers of ranks. Pages of others stay whole."""
# More would make more runs of fewer bytes.
_CONVOLUTION_HEADS_MAX: Final = 64

_Channels: TypeAlias = tuple[tuple[str, int], ...]
"""Kinds of channels in the order of the memory, with the number of each on a rank."""


@dataclass(frozen=True, slots=True)
class StateArray:
    """An array of a rank's page, as vLLM describes it."""

    shape: tuple[int, ...]
    dtype: str
    element_bytes: int

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.element_bytes


@dataclass(frozen=True, slots=True)
class StatePart:
    """Bytes of a page in which a rank's heads lie one after the other, `unit_bytes` each."""

    name: str
    dtype: str
    offset_bytes: int
    unit_bytes: int


@dataclass(frozen=True, slots=True)
class StateHeads:
    """The parts of a page. `head_count` counts the heads of all ranks."""

    head_count: int
    parts: tuple[StatePart, ...]


def state_heads(
    kind: str,
    arrays: Sequence[StateArray],
    *,
    ranks: int,
    group_count: int,
    channels_first: bool,
) -> StateHeads | None:
    """The heads of a state of `kind`, or None for a page that cannot be divided.

    `group_count`: heads of the model share the inputs of so many groups; 0 where that is unknown. `channels_first`: the
    inputs of one channel lie together, not those of one token.
    """
    found = _channels(kind, arrays, ranks, group_count, channels_first=channels_first)
    if found is None:
        return None
    heads, channels = found
    convolution, *recurrent = arrays
    if not heads or any(count % heads for _, count in channels):
        return None
    total = sum(count for _, count in channels)
    taps = prod(convolution.shape) // total
    parts = list(_convolution_parts(convolution, channels, heads, taps, channels_first))
    offset = convolution.size_bytes
    for array in recurrent:
        if array.shape[0] % heads:
            return None
        parts.append(StatePart("recurrent", array.dtype, offset, array.size_bytes // heads))
        offset += array.size_bytes
    return StateHeads(heads * ranks, tuple(parts))


def _convolution_parts(
    array: StateArray, channels: _Channels, heads: int, taps: int, channels_first: bool
) -> list[StatePart]:
    parts: list[StatePart] = []
    offset = 0
    repeats, together = (1, taps) if channels_first else (taps, 1)
    for tap in range(repeats):
        for name, count in channels:
            size = count * together * array.element_bytes
            parts.append(StatePart(f"{name}.{tap}", array.dtype, offset, size // heads))
            offset += size
    return parts


def _channels(
    kind: str, arrays: Sequence[StateArray], ranks: int, group_count: int, *, channels_first: bool
) -> tuple[int, _Channels] | None:
    """The heads of a rank, and the channels of its convolution. None for unknown shapes."""
    if any(len(array.shape) < 2 for array in arrays):
        return None
    total = arrays[0].shape[0 if channels_first else 1]
    if kind == SHORT_CONVOLUTION and len(arrays) == 1:
        # A channel depends on no other one.
        heads = _most_heads(total * ranks)
        return (heads // ranks, (("input", total),)) if heads % ranks == 0 else None
    if len(arrays) != 2 or len(arrays[1].shape) != 3:
        return None
    heads, height, width = arrays[1].shape
    if kind == GATED_DELTA_NET:
        values = heads * height
        keys, odd = divmod(total - values, 2)
        if odd or keys <= 0 or keys % width:
            return None
        # Each key has one value or several.
        return keys // width, (("query", keys), ("key", keys), ("value", values))
    if kind == MAMBA2:
        inputs = heads * height
        grouped, odd = divmod(total - inputs, 2)
        groups = grouped // width
        # Otherwise, ranks have copies of groups.
        if odd or grouped % width or groups * ranks != group_count:
            return None
        return groups, (("input", inputs), ("before", grouped), ("after", grouped))
    return None


def _most_heads(channels: int) -> int:
    """The largest number of heads, up to a bound, that divides channels and does not depend on the ranks."""
    bound = min(_CONVOLUTION_HEADS_MAX, channels)
    return next(heads for heads in range(bound, 0, -1) if channels % heads == 0)
