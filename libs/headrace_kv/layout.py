"""Describes the memory of KV caches as data, to and from protos/headrace/kv/v1/layout.proto. Pure.

A *layer* is a cache layer: a model layer with two caches of different shapes counts as two. Tensor-parallel rank t of
pipeline stage s is rank `s * tensor_parallel_size + t`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, TypeVar

from google.protobuf.message import Message

from headrace.kv.v1 import layout_pb2
from headrace_common.errors import InternalError, LayoutMismatch
from headrace_common.limits import require_limits

TOKEN_OUTER: Final = "token_outer"
"""The block_format in which single tokens of a head are addressable."""

GroupKind = Literal["tokens", "state"]
TOKENS: Final = "tokens"
STATE: Final = "state"
_KINDS: Final[dict[GroupKind, layout_pb2.CacheGroup.Kind.ValueType]] = {
    TOKENS: layout_pb2.CacheGroup.KIND_TOKENS,
    STATE: layout_pb2.CacheGroup.KIND_STATE,
}


@dataclass(frozen=True, slots=True)
class Part:
    """One named array of a group: "kv", "k", "v", "nope", "rope", "k_scale", "conv", "ssm" ...

    `unit_bytes` are the bytes of one head and one token. With another block_format than TOKEN_OUTER they are those of
    one head and one whole block. In a state group they are those of one head and one request's page.
    """

    name: str
    dtype: str
    unit_bytes: int
    block_format: str = TOKEN_OUTER


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with caches of one shape, which share one block table.

    A block of a "tokens" group holds `block_tokens` tokens. A "state" group has one page per request, which is sent
    whole at the end; its block_tokens is 0. `head_count` counts the heads of the whole model. A single head, as in
    MLA, is held by every rank.

    With `window_tokens`, a token attends to itself and the `window_tokens` - 1 tokens before it. With `chunk_tokens`,
    it attends to tokens from the last multiple of that on. Engines free the blocks that no later token attends to.
    """

    name: str
    layers: tuple[int, ...]
    kind: GroupKind
    head_count: int
    block_tokens: int
    parts: tuple[Part, ...]
    window_tokens: int = 0
    chunk_tokens: int = 0

    @property
    def is_windowed(self) -> bool:
        """Whether a token attends only to tokens near it."""
        return self.window_tokens > 0 or self.chunk_tokens > 0

    @property
    def token_addressable(self) -> bool:
        """Whether single tokens can be copied, so that block sizes may differ between workers."""
        return self.kind == TOKENS and all(part.block_format == TOKEN_OUTER for part in self.parts)

    def blocks_between(self, start_token: int, end_token: int) -> int:
        """Number of blocks that hold tokens [start_token, end_token), 1 for a state."""
        if self.kind == STATE:
            return 1
        return -(-end_token // self.block_tokens) - start_token // self.block_tokens

    def first_sent_token(self, start_token: int, end_token: int) -> int:
        """The first of the tokens [start_token, end_token) that a transfer carries; `end_token` when it carries none.

        With a window, these are the blocks that the token at `end_token` attends to. Neither side holds the blocks
        before them, and both sides use blocks of the same size.
        """
        if self.chunk_tokens:
            attended = end_token - end_token % self.chunk_tokens
        elif self.window_tokens:
            attended = max(0, end_token - self.window_tokens + 1)
        else:
            return start_token
        return max(start_token, attended - attended % self.block_tokens)

    def window_blocks(self, token_count: int) -> int:
        """The most blocks that a request with `token_count` tokens holds of a group with a window."""
        # A window that begins inside a block ends inside another one.
        span = (self.chunk_tokens or self.window_tokens) + self.block_tokens
        return -(-min(token_count, span) // self.block_tokens)

    def bytes_between(self, start_token: int, end_token: int, heads: int) -> int:
        """Bytes to copy for tokens [start_token, end_token) of `heads` heads of one layer."""
        blocks = self.blocks_between(start_token, end_token)
        tokens = blocks if self.kind == STATE else end_token - start_token
        return heads * sum(
            part.unit_bytes * (tokens if part.block_format == TOKEN_OUTER else blocks)
            for part in self.parts
        )


@dataclass(frozen=True)
class KvLayout:
    """The KV cache of a worker. See layout.proto for each field's meaning and unit."""

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
        """A model in which all layers are alike. `parts` maps names to unit bytes, see Part."""
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
    def keeps_all_tokens(self) -> bool:
        """Whether every group does: a block is cached with its last token, and has no state or window."""
        return all(group.kind == TOKENS and not group.is_windowed for group in self.groups)

    @property
    def rank_count(self) -> int:
        """Ranks of all stages."""
        return self.tensor_parallel_size * len(self.stage_starts)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Layouts are keys of dictionaries. Those of many layers are long.
        return hash((self.model, self.tensor_parallel_size, self.groups, self.stage_starts))

    @cached_property
    def block_tokens(self) -> int:
        """Tokens of one block of the first group, which engines count in; 1 for a layout of states only."""
        return self.groups[0].block_tokens or 1

    @cached_property
    def token_bytes(self) -> float:
        """KV of one token, over all ranks, without states and windows."""
        size = self.block_tokens
        return sum(
            len(group.layers) * group.bytes_between(0, size, group.head_count) / size
            for group in self.groups
            if group.kind == TOKENS
        )

    @property
    def kv_head_count(self) -> int:
        """Heads of the first group."""
        return self.groups[0].head_count

    @property
    def dtype(self) -> str:
        """Element type of the first group's first part."""
        return self.groups[0].parts[0].dtype

    def group_index(self, layer: int) -> int:
        """Index of a layer's group. Raises InternalError for a layer without one."""
        index = self._group_indices.get(layer)
        if index is None:
            raise InternalError(f"the layout has no layer {layer}")
        return index

    def group_of(self, layer: int) -> CacheGroup:
        """The group of a layer. Raises InternalError for a layer without one."""
        return self.groups[self.group_index(layer)]

    def stage_of(self, layer: int) -> int:
        """The pipeline stage that holds a layer."""
        return bisect_right(self.stage_starts, layer) - 1

    def layers_of(self, rank: int) -> range:
        """The layers that a rank's stage holds."""
        stage = rank // self.tensor_parallel_size
        return range(self.stage_starts[stage], (*self.stage_starts[1:], self.layer_count)[stage])

    @cached_property
    def _group_indices(self) -> dict[int, int]:
        return {layer: index for index, group in enumerate(self.groups) for layer in group.layers}


@dataclass(frozen=True, slots=True)
class Region:
    """One part of one layer on one rank: an array of blocks, heads and tokens, strided in any order.

    `offset_bytes` counts from the rank's base address. With a token_stride_bytes of 0, only whole (block, head) units
    can be copied: blocks of another block_format than TOKEN_OUTER, and state pages, which have a block_tokens of 0.
    `unit_bytes` is as in Part, and `head_count` counts this rank's heads.
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
        """Whether single tokens can be copied."""
        return self.token_stride_bytes > 0

    @property
    def end_bytes(self) -> int:
        """One past its last byte, relative to the rank's base address."""
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
    """One rank's KV memory and its transport session.

    Every region lies in [base_address, base_address + arena_bytes). For separately allocated tensors the base is the
    lowest address, and memory between them does not belong to the rank.
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


_Mirror = TypeVar("_Mirror", Part, CacheGroup, KvLayout, Region, RankMemory)


class WorkerRef(NamedTuple):
    """Names one incarnation of a worker (I4). A tuple, because routing hashes many of them."""

    worker_id: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.incarnation}"


def layout_to_proto(layout: KvLayout) -> layout_pb2.KvLayout:
    values = asdict(layout)
    for group in values["groups"]:
        group["kind"] = _KINDS[group["kind"]]
    return layout_pb2.KvLayout(**values)


def engine_hash(layout: KvLayout) -> bytes:
    """SHA-256 of a layout with all its fields: the model, its weights, and how the engine divides and stores it."""
    return hashlib.sha256(layout_to_proto(layout).SerializeToString(deterministic=True)).digest()


def layout_from_proto(message: layout_pb2.KvLayout) -> KvLayout:
    """Raises LayoutMismatch for impossible pipeline stages, and for values beyond all bounds."""
    require_limits(message)
    starts = tuple(message.stage_starts)
    if starts[:1] != (0,) or starts != tuple(sorted(set(starts))):
        named = ", ".join(map(str, starts)) or "none"
        raise LayoutMismatch(
            f"there are no pipeline stages from layers {named} on: give them ascending from 0",
            metadata={"stage_starts": named},
        )
    return _mirror(
        KvLayout,
        message,
        stage_starts=starts,
        broadcast_width=max(1, message.broadcast_width),
        groups=tuple(map(_group_from_proto, message.groups)),
    )


def _group_from_proto(message: layout_pb2.CacheGroup) -> CacheGroup:
    is_state = message.kind == layout_pb2.CacheGroup.KIND_STATE
    return _mirror(
        CacheGroup,
        message,
        layers=tuple(message.layers),
        kind=STATE if is_state else TOKENS,
        parts=tuple(_mirror(Part, part) for part in message.parts),
    )


def _mirror(kind: type[_Mirror], message: Message, /, **others: Any) -> _Mirror:
    """A dataclass with the fields of a message, but for `others`."""
    names = [one.name for one in fields(kind) if one.name not in others]
    return kind(**{name: getattr(message, name) for name in names}, **others)


def rank_memory_to_proto(memory: RankMemory) -> layout_pb2.RankMemory:
    return layout_pb2.RankMemory(**asdict(memory))


def rank_memory_from_proto(message: layout_pb2.RankMemory) -> RankMemory:
    regions = tuple(_mirror(Region, region) for region in message.regions)
    return _mirror(RankMemory, message, regions=regions)


def descriptor_to_proto(descriptor: KvDescriptor) -> layout_pb2.KvDescriptor:
    return layout_pb2.KvDescriptor(
        layout=layout_to_proto(descriptor.layout),
        ranks=[rank_memory_to_proto(rank) for rank in descriptor.ranks],
    )


def descriptor_from_proto(message: layout_pb2.KvDescriptor) -> KvDescriptor:
    """Raises LayoutMismatch for values beyond all bounds, and for regions that lie outside their rank's memory."""
    layout = layout_from_proto(message.layout)
    ranks = tuple(map(rank_memory_from_proto, message.ranks))
    for memory in ranks:
        for region in memory.regions:
            if fault := _region_fault(region, memory, layout):
                raise LayoutMismatch(
                    f"the region {region.part} of layer {region.layer} on rank {memory.rank} {fault}",
                    metadata={"layer": str(region.layer), "part": region.part},
                )
    return KvDescriptor(layout, ranks)


def _region_fault(region: Region, memory: RankMemory, layout: KvLayout) -> str:
    if region.layer >= layout.layer_count:
        return f"is of none of the {layout.layer_count} layers"
    if not (region.block_count and region.head_count and region.unit_bytes):
        return "has no blocks, no heads, or units of 0 bytes"
    if not region.block_tokens and layout.group_of(region.layer).kind == TOKENS:
        return "has blocks of 0 tokens"
    if region.end_bytes > memory.arena_bytes or memory.base_address + region.end_bytes >= 2**63:
        return "ends outside the memory of the rank"
    return ""
