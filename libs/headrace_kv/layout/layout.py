"""How KV caches lie in memory, as data. Pure; mirrors protos/headrace/kv/v1/layout.proto.

A *layer* is a cache layer: a model layer that keeps two differently shaped caches counts as two. Tensor-parallel rank t
of pipeline stage s is rank `s * tensor_parallel_size + t`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

from headrace_common.errors import InternalError

TOKEN_OUTER: Final = "token_outer"
"""The block_format in which one head's tokens of a block may be addressed one by one."""

GroupKind = Literal["tokens", "state"]
TOKENS: Final = "tokens"
STATE: Final = "state"


@dataclass(frozen=True, slots=True)
class Part:
    """One named array of a group: "kv", "k", "v", "nope", "rope", "k_scale", "conv", "ssm" ...

    `unit_bytes` is what one head takes for one token; with another block_format than TOKEN_OUTER, for one whole
    block, and in a state group, for one request's page.
    """

    name: str
    dtype: str
    unit_bytes: int
    block_format: str = TOKEN_OUTER


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose caches are shaped alike and share one block table.

    A "tokens" group keeps `block_tokens` tokens in a block. A "state" group keeps one page per request, which is handed
    over whole at the end; its block_tokens is 0. `head_count` counts the whole model's heads; one head, as in MLA, is
    held by every rank.
    """

    name: str
    layers: tuple[int, ...]
    kind: GroupKind
    head_count: int
    block_tokens: int
    parts: tuple[Part, ...]

    @property
    def token_addressable(self) -> bool:
        """Whether any token may be copied alone, so that block sizes may differ between workers."""
        return self.kind == TOKENS and all(part.block_format == TOKEN_OUTER for part in self.parts)

    def blocks_between(self, start_token: int, end_token: int) -> int:
        """Blocks that hold tokens [start_token, end_token): one page for a state."""
        if self.kind == STATE:
            return 1
        return -(-end_token // self.block_tokens) - start_token // self.block_tokens

    def bytes_between(self, start_token: int, end_token: int, heads: int) -> int:
        """Bytes that travel for tokens [start_token, end_token) of some heads of one layer."""
        blocks = self.blocks_between(start_token, end_token)
        tokens = blocks if self.kind == STATE else end_token - start_token
        return heads * sum(
            part.unit_bytes * (tokens if part.block_format == TOKEN_OUTER else blocks)
            for part in self.parts
        )


@dataclass(frozen=True)
class KvLayout:
    """A worker's KV cache as a whole. See layout.proto for each field's meaning and unit."""

    model: str
    tensor_parallel_size: int
    groups: tuple[CacheGroup, ...]
    stage_starts: tuple[int, ...] = (0,)
    broadcast_width: int = 1

    @classmethod
    def attention(
        cls,
        *,
        model: str,
        dtype: str,
        layer_count: int,
        kv_head_count: int,
        block_tokens: int,
        parts: Mapping[str, int],
        tensor_parallel_size: int = 1,
        block_format: str = TOKEN_OUTER,
        stage_starts: tuple[int, ...] = (0,),
        broadcast_width: int = 1,
    ) -> KvLayout:
        """A model whose layers are all alike; `parts` maps names to unit bytes, see Part."""
        group = CacheGroup(
            name="attention",
            layers=tuple(range(layer_count)),
            kind=TOKENS,
            head_count=kv_head_count,
            block_tokens=block_tokens,
            parts=tuple(Part(name, dtype, size, block_format) for name, size in parts.items()),
        )
        return cls(model, tensor_parallel_size, (group,), stage_starts, broadcast_width)

    @cached_property
    def layer_count(self) -> int:
        """Layers of all groups and stages."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def rank_count(self) -> int:
        """Ranks of all stages."""
        return self.tensor_parallel_size * len(self.stage_starts)

    @property
    def block_tokens(self) -> int:
        """Tokens of one block of the first group, by which engines count; 1 where there are only states."""
        return self.groups[0].block_tokens or 1

    @property
    def kv_head_count(self) -> int:
        """Heads of the first group."""
        return self.groups[0].head_count

    @property
    def dtype(self) -> str:
        """Element type of the first group's first part."""
        return self.groups[0].parts[0].dtype

    def blocks_for(self, token_count: int) -> int:
        """Blocks of the first group that `token_count` tokens take."""
        return self.groups[0].blocks_between(0, token_count)

    def group_index(self, layer: int) -> int:
        """Which group a layer belongs to. Raises InternalError for a layer in none."""
        index = self._group_indices.get(layer)
        if index is None:
            raise InternalError(f"the layout has no layer {layer}")
        return index

    def group_of(self, layer: int) -> CacheGroup:
        """The group of a layer. Raises InternalError for a layer in none."""
        return self.groups[self.group_index(layer)]

    def stage_of(self, layer: int) -> int:
        """The pipeline stage that holds a layer."""
        return bisect_right(self.stage_starts, layer) - 1

    def layers_of(self, rank: int) -> range:
        """The layers that a rank's stage holds."""
        stage = rank // self.tensor_parallel_size
        ends = (*self.stage_starts[1:], self.layer_count)
        return range(self.stage_starts[stage], ends[stage])

    @cached_property
    def _group_indices(self) -> dict[int, int]:
        return {layer: index for index, group in enumerate(self.groups) for layer in group.layers}


@dataclass(frozen=True, slots=True)
class Region:
    """One part of one layer on one rank: an array of blocks, heads and tokens, strided in any order.

    `offset_bytes` counts from the rank's base address. A token_stride_bytes of 0 says that only whole (block, head)
    units may be copied, as in opaque interiors and state pages (whose block_tokens is 0). `unit_bytes` is as in Part,
    `head_count` of this rank.
    """

    layer: int
    part: str
    offset_bytes: int
    block_count: int
    head_count: int
    block_tokens: int
    unit_bytes: int
    block_stride_bytes: int
    head_stride_bytes: int
    token_stride_bytes: int

    @property
    def token_addressable(self) -> bool:
        """Whether its tokens may be copied one by one."""
        return self.token_stride_bytes > 0

    @property
    def end_bytes(self) -> int:
        """One past its last byte, counted as offset_bytes is."""
        tokens = self.block_tokens if self.token_addressable else 1
        return (
            self.offset_bytes
            + (self.block_count - 1) * self.block_stride_bytes
            + (self.head_count - 1) * self.head_stride_bytes
            + (tokens - 1) * self.token_stride_bytes
            + self.unit_bytes
        )


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's KV memory, and where the transport finds it.

    Every region lies in [base_address, base_address + arena_bytes). Of separately allocated tensors the base is the
    lowest; what lies between them is not the rank's.
    """

    rank: int
    transport: str
    session: str
    base_address: int
    arena_bytes: int
    regions: tuple[Region, ...]

    @property
    def block_count(self) -> int:
        """Blocks of the first region."""
        return self.regions[0].block_count if self.regions else 0


@dataclass(frozen=True, slots=True)
class KvDescriptor:
    """The KV memory of one worker incarnation, by rank."""

    layout: KvLayout
    ranks: tuple[RankMemory, ...]


class WorkerRef(NamedTuple):
    """Names one incarnation of a worker (I4). A tuple, because routing looks it up by the hundred."""

    worker_id: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.incarnation}"
