"""How KV caches lie in memory, as data. Pure; mirrors protos/headrace/kv/v1/layout.proto.

A *layer* is a cache layer: a model layer that keeps two differently shaped caches counts as two. Tensor-parallel rank t
of pipeline stage s is rank `s * tensor_parallel_size + t`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

from headrace.kv.v1 import layout_pb2
from headrace_common.errors import InternalError, LayoutMismatch
from headrace_common.limits import require_limits

TOKEN_OUTER: Final = "token_outer"
"""The interior in which one head's tokens of a block may be addressed one by one."""

GroupKind = Literal["tokens", "state"]
TOKENS: Final = "tokens"
STATE: Final = "state"


@dataclass(frozen=True, slots=True)
class Part:
    """One named array of a group: "kv", "k", "v", "nope", "rope", "k_scale", "conv", "ssm" ...

    `unit_bytes` is what one head takes for one token; with another interior than TOKEN_OUTER, for one whole block, and
    in a state group, for one request's page.
    """

    name: str
    dtype: str
    unit_bytes: int
    interior: str = TOKEN_OUTER


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
        return self.kind == TOKENS and all(part.interior == TOKEN_OUTER for part in self.parts)

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
            part.unit_bytes * (tokens if part.interior == TOKEN_OUTER else blocks)
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
        interior: str = TOKEN_OUTER,
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
            parts=tuple(Part(name, dtype, size, interior) for name, size in parts.items()),
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


def fingerprint(layout: KvLayout) -> KvLayout:
    """The layout without what may differ between two workers that hand over to each other.

    That is parallelism, local broadcast, and the block size where tokens are addressable. Two workers can talk when
    their fingerprints are equal.
    """
    groups = (
        replace(group, block_tokens=0) if group.token_addressable else group
        for group in layout.groups
    )
    ordered = tuple(
        replace(group, parts=tuple(sorted(group.parts, key=lambda part: part.name)))
        for group in groups
    )
    return KvLayout(layout.model, 0, ordered)


def layout_differences(ours: KvLayout, theirs: KvLayout) -> dict[str, str]:
    """What keeps two workers from talking: paths such as "attention.k.dtype", each with both values."""
    left, right = _flat(fingerprint(ours)), _flat(fingerprint(theirs))
    return {
        path: f"{left.get(path, 'none')} != {right.get(path, 'none')}"
        for path in sorted(left.keys() | right.keys())
        if left.get(path) != right.get(path)
    }


def require_compatible(ours: KvLayout, theirs: KvLayout) -> None:
    """Raises LayoutMismatch naming the differing fields (I8)."""
    differences = layout_differences(ours, theirs)
    if differences:
        named = ", ".join(f"{name} ({values})" for name, values in differences.items())
        raise LayoutMismatch(
            f"KV layouts differ in {named}: start both workers with the same model and cache settings",
            metadata=differences,
        )


def count_spans(numbers: Iterable[int]) -> str:
    """ "3, 17-29" for {3, 17, 18, ..., 29}."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] + 1 == number:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _flat(layout: KvLayout) -> dict[str, str]:
    found = {"model": layout.model, "groups": ", ".join(group.name for group in layout.groups)}
    for group in layout.groups:
        at = group.name
        found[f"{at}.layers"] = count_spans(group.layers)
        found[f"{at}.kind"] = group.kind
        found[f"{at}.head_count"] = str(group.head_count)
        found[f"{at}.block_tokens"] = str(group.block_tokens)
        found[f"{at}.parts"] = ", ".join(part.name for part in group.parts)
        for part in group.parts:
            found[f"{at}.{part.name}.dtype"] = part.dtype
            found[f"{at}.{part.name}.unit_bytes"] = str(part.unit_bytes)
            found[f"{at}.{part.name}.interior"] = part.interior
    return found


_KINDS: Final[dict[GroupKind, layout_pb2.CacheGroup.Kind.ValueType]] = {
    TOKENS: layout_pb2.CacheGroup.KIND_TOKENS,
    STATE: layout_pb2.CacheGroup.KIND_STATE,
}


def layout_to_proto(layout: KvLayout) -> layout_pb2.KvLayout:
    return layout_pb2.KvLayout(
        model=layout.model,
        tensor_parallel_size=layout.tensor_parallel_size,
        stage_starts=layout.stage_starts,
        broadcast_width=layout.broadcast_width,
        groups=[
            layout_pb2.CacheGroup(
                name=group.name,
                layers=group.layers,
                kind=_KINDS[group.kind],
                head_count=group.head_count,
                block_tokens=group.block_tokens,
                parts=[layout_pb2.Part(**asdict(part)) for part in group.parts],
            )
            for group in layout.groups
        ],
    )


def layout_from_proto(message: layout_pb2.KvLayout) -> KvLayout:
    """Raises LayoutMismatch for impossible pipeline stages, and for what is beyond all bounds."""
    require_limits(message)
    starts = tuple(message.stage_starts)
    if starts[:1] != (0,) or starts != tuple(sorted(set(starts))):
        named = ", ".join(map(str, starts)) or "none"
        raise LayoutMismatch(
            f"there are no pipeline stages from layers {named} on: give them ascending from 0",
            metadata={"stage_starts": named},
        )
    return KvLayout(
        model=message.model,
        tensor_parallel_size=message.tensor_parallel_size,
        stage_starts=starts,
        broadcast_width=max(1, message.broadcast_width),
        groups=tuple(
            CacheGroup(
                name=group.name,
                layers=tuple(group.layers),
                kind=STATE if group.kind == layout_pb2.CacheGroup.KIND_STATE else TOKENS,
                head_count=group.head_count,
                block_tokens=group.block_tokens,
                parts=tuple(
                    Part(part.name, part.dtype, part.unit_bytes, part.interior)
                    for part in group.parts
                ),
            )
            for group in message.groups
        ),
    )


def rank_memory_to_proto(memory: RankMemory) -> layout_pb2.RankMemory:
    values = {field.name: getattr(memory, field.name) for field in fields(RankMemory)}
    values["regions"] = [layout_pb2.Region(**asdict(region)) for region in memory.regions]
    return layout_pb2.RankMemory(**values)


def rank_memory_from_proto(message: layout_pb2.RankMemory) -> RankMemory:
    values = {field.name: getattr(message, field.name) for field in fields(RankMemory)}
    values["regions"] = tuple(
        Region(**{field.name: getattr(region, field.name) for field in fields(Region)})
        for region in message.regions
    )
    return RankMemory(**values)


def descriptor_to_proto(descriptor: KvDescriptor) -> layout_pb2.KvDescriptor:
    return layout_pb2.KvDescriptor(
        layout=layout_to_proto(descriptor.layout),
        ranks=[rank_memory_to_proto(rank) for rank in descriptor.ranks],
    )


def descriptor_from_proto(message: layout_pb2.KvDescriptor) -> KvDescriptor:
    return KvDescriptor(
        layout=layout_from_proto(message.layout),
        ranks=tuple(rank_memory_from_proto(rank) for rank in message.ranks),
    )
