"""Groups of layers that share a block list for each request. Pure.

A page has the last inputs of a convolution, then a recurrent state for each head. The inputs are channels of several
kinds, such as queries, keys and values. Each rank has its heads of each kind, in this order. In Mamba2, some kinds
belong to groups of heads instead; ranks of which there are more than groups have copies of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import Final

from headrace_kv.layout import STATE, TOKENS, GroupKind

GATED_DELTA_NET: Final = "gdn_attn"
MAMBA2: Final = "mamba2"
SHORT_CONVOLUTION: Final = "short_conv"
# More would make more runs of fewer bytes.
_CONVOLUTION_HEADS_MAX: Final = 64


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
    """The parts of a page that are divided alike. `head_count` counts the heads of all ranks."""

    head_count: int
    parts: tuple[StatePart, ...]


@dataclass(frozen=True, slots=True)
class _Channels:
    """Channels of a rank's convolution, of one kind. `held` of the `head_count` heads of all ranks are the rank's."""

    name: str
    count: int
    held: int
    head_count: int


def state_heads(
    kind: str,
    arrays: Sequence[StateArray],
    *,
    ranks: int,
    group_count: int,
    channels_first: bool,
) -> tuple[StateHeads, ...]:
    """The heads of a state of `kind`, and then its groups of heads. Empty for a page that cannot be divided.

    `group_count`: heads of the model share the inputs of so many groups; 0 where that is unknown. `channels_first`: the
    inputs of one channel lie together, not those of one token.
    """
    if any(len(array.shape) < 2 for array in arrays):
        return ()
    convolution, *recurrent = arrays
    total = convolution.shape[0 if channels_first else 1]
    channels = _channels(kind, total, recurrent, ranks, group_count)
    if not channels or any(one.count % one.held for one in channels):
        return ()
    heads = channels[0]
    taps = prod(convolution.shape) // total
    parts = _convolution_parts(convolution, channels, taps, channels_first)
    offset = convolution.size_bytes
    for array in recurrent:
        if array.shape[0] % heads.held:
            return ()
        part = StatePart("recurrent", array.dtype, offset, array.size_bytes // heads.held)
        parts[heads.head_count, heads.held].append(part)
        offset += array.size_bytes
    return tuple(StateHeads(head_count, tuple(found)) for (head_count, _), found in parts.items())


def _convolution_parts(
    array: StateArray, channels: Sequence[_Channels], taps: int, channels_first: bool
) -> dict[tuple[int, int], list[StatePart]]:
    """By (heads of all ranks, heads of a rank), in the order of the channels."""
    parts: dict[tuple[int, int], list[StatePart]] = {}
    offset = 0
    repeats, together = (1, taps) if channels_first else (taps, 1)
    for tap in range(repeats):
        for one in channels:
            size = one.count * together * array.element_bytes
            part = StatePart(f"{one.name}.{tap}", array.dtype, offset, size // one.held)
            parts.setdefault((one.head_count, one.held), []).append(part)
            offset += size
    return parts


def _channels(
    kind: str, total: int, recurrent: Sequence[StateArray], ranks: int, group_count: int
) -> tuple[_Channels, ...]:
    """The `total` channels of a rank's convolution, in the order of the memory. Empty for unknown shapes."""
    if kind == SHORT_CONVOLUTION and not recurrent:
        # A channel depends on no other one.
        head_count = _most_heads(total * ranks)
        held, odd = divmod(head_count, ranks)
        return () if odd else (_Channels("input", total, held, head_count),)
    if len(recurrent) != 1 or len(recurrent[0].shape) != 3:
        return ()
    heads, height, width = recurrent[0].shape
    inputs = heads * height
    shared, odd = divmod(total - inputs, 2)
    if odd or shared <= 0 or shared % width:
        return ()
    held = shared // width
    if kind == GATED_DELTA_NET:
        # Each key has one value or several.
        return tuple(
            _Channels(name, count, held, held * ranks)
            for name, count in (("query", shared), ("key", shared), ("value", inputs))
        )
    if kind == MAMBA2 and group_count and held == max(1, group_count // ranks):
        return (
            _Channels("input", inputs, heads, heads * ranks),
            _Channels("before", shared, held, group_count),
            _Channels("after", shared, held, group_count),
        )
    return ()


def _most_heads(channels: int) -> int:
    """The largest number of heads, up to a bound, that divides channels and does not depend on the ranks."""
    bound = min(_CONVOLUTION_HEADS_MAX, channels)
    return next(heads for heads in range(bound, 0, -1) if channels % heads == 0)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The vLLM KV cache group with this `index`. `layers` are (number in the layout, name).

    Entry i of a request's block list holds the tokens from i * block_tokens on. For a state, it holds the state after
    the last computed one of these tokens. Groups may share memory, but a block belongs to one group at a time.
    `block_format` names how a block is packed. It is empty where the attention kernels decide that. `page_bytes`: one
    block of one layer on a rank. `window_tokens` and `chunk_tokens` are those of CacheGroup. vLLM frees the blocks of
    such a group that no later token attends to, and has its null block in their place. A state with `state_parts` has
    heads; without them, its page is one piece for each rank. With pipeline stages, `layers` are those of one stage,
    numbered from 0, and no stage has more layers of all groups than `stage_layers_max`.
    """

    index: int
    name: str
    kind: GroupKind
    head_count: int
    block_tokens: int
    block_format: str
    layers: tuple[tuple[int, str], ...]
    page_bytes: int = 0
    window_tokens: int = 0
    chunk_tokens: int = 0
    state_parts: tuple[StatePart, ...] = ()
    stage_layers_max: int = 0

    @property
    def is_windowed(self) -> bool:
        """Whether vLLM frees blocks of a request that still computes."""
        return self.window_tokens > 0 or self.chunk_tokens > 0

    @property
    def keeps_all_tokens(self) -> bool:
        """Whether a request holds the blocks of all its tokens until it ends."""
        return self.kind == TOKENS and not self.is_windowed

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers of the rank with the most layers: the same in every process."""
        return self.page_bytes * (self.stage_layers_max or len(self.layers))

    def blocks_between(
        self, block_ids: Sequence[int], start_token: int, end_token: int
    ) -> tuple[int, ...]:
        """The blocks in a request's list that hold tokens [start_token, end_token), or the state after them."""
        last = -(-end_token // self.block_tokens)
        return tuple(
            block_ids[last - 1 if self.kind == STATE else start_token // self.block_tokens : last]
        )


def token_stride(groups: Iterable[LayerGroup]) -> int:
    """The smallest number of tokens that fills whole blocks of every group with tokens. 0 without such groups."""
    sizes = [group.block_tokens for group in groups if group.kind == TOKENS]
    return lcm(*sizes) if sizes else 0
