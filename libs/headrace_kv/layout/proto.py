"""Conversion between layouts and protos/headrace/kv/v1/layout.proto. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Final

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import LayoutMismatch
from headrace_common.limits import require_limits
from headrace_common.registry.duties import COMPUTE_PROMPTS, GENERATE
from headrace_kv.layout.compatibility import PairFault, PairSide, fingerprint, pair_faults
from headrace_kv.layout.layout import (
    STATE,
    TOKENS,
    CacheGroup,
    GroupKind,
    KvDescriptor,
    KvLayout,
    Part,
    RankMemory,
    Region,
)

_KINDS: Final[dict[GroupKind, layout_pb2.CacheGroup.Kind.ValueType]] = {
    TOKENS: layout_pb2.CacheGroup.KIND_TOKENS,
    STATE: layout_pb2.CacheGroup.KIND_STATE,
}


def pair_faults_of(members: Iterable[registry_pb2.Member]) -> list[PairFault]:
    """As pair_faults, for the members of a registry. Raises LayoutMismatch as layout_from_proto does."""
    sides = [(member.role, pair_side(member)) for member in members if member.HasField("layout")]
    return pair_faults(
        [side for role, side in sides if role in COMPUTE_PROMPTS],
        [side for role, side in sides if role in GENERATE],
    )


def pair_side(member: registry_pb2.Member) -> PairSide:
    """A worker's record as a member of pairs. Raises LayoutMismatch as layout_from_proto does."""
    layout = layout_from_proto(member.layout)
    return PairSide(member.worker_id, member.model, layout, member.transport)


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
                window_tokens=group.window_tokens,
                chunk_tokens=group.chunk_tokens,
            )
            for group in layout.groups
        ],
    )


def layout_hash(layout: KvLayout) -> bytes:
    """SHA-256 of the layout's fingerprint: equal for all workers that can exchange KV."""
    return engine_hash(fingerprint(layout))


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
                    Part(part.name, part.dtype, part.unit_bytes, part.block_format)
                    for part in group.parts
                ),
                window_tokens=group.window_tokens,
                chunk_tokens=group.chunk_tokens,
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
