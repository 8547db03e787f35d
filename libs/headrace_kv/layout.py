"""How KV caches lie in memory, as data. Pure; mirrors protos/headrace/kv/v1/layout.proto."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from headrace.kv.v1 import layout_pb2
from headrace_common.errors import LayoutMismatch


@dataclass(frozen=True, slots=True)
class KvLayout:
    """A worker's KV cache as a whole. See layout.proto for each field's meaning and unit."""

    model: str
    dtype: str
    layer_count: int
    kv_head_count: int
    tensor_parallel_size: int
    block_tokens: int
    block_head_bytes: int
    interior: str

    @property
    def heads_per_rank(self) -> int:
        """KV heads that one rank holds; ranks beyond the head count hold copies."""
        return max(1, self.kv_head_count // self.tensor_parallel_size)

    def blocks_for(self, token_count: int) -> int:
        """Blocks that `token_count` tokens take."""
        return -(-token_count // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Region:
    """One part of one layer: an array of blocks of heads, from `offset_bytes` into the rank's arena."""

    layer: int
    part: str
    offset_bytes: int
    block_stride_bytes: int
    head_stride_bytes: int
    head_bytes: int


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's registered arena, and where the transport finds it."""

    rank: int
    transport: str
    session: str
    base_address: int
    arena_bytes: int
    block_count: int
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class KvDescriptor:
    """The KV memory of one worker incarnation, by rank."""

    layout: KvLayout
    ranks: tuple[RankMemory, ...]


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """Names one incarnation of a worker (I4)."""

    worker_id: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.incarnation}"


def layout_differences(ours: KvLayout, theirs: KvLayout) -> dict[str, str]:
    """Fields that keep two workers from talking, each with both values. Tensor parallelism may differ."""
    return {
        field.name: f"{getattr(ours, field.name)} != {getattr(theirs, field.name)}"
        for field in fields(KvLayout)
        if field.name != "tensor_parallel_size"
        and getattr(ours, field.name) != getattr(theirs, field.name)
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


def layout_to_proto(layout: KvLayout) -> layout_pb2.KvLayout:
    return layout_pb2.KvLayout(**asdict(layout))


def layout_from_proto(message: layout_pb2.KvLayout) -> KvLayout:
    return KvLayout(**{field.name: getattr(message, field.name) for field in fields(KvLayout)})


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
