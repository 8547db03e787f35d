"""Describes a rank's KV tensors as regions of one arena, and joins the layers of pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from headrace_common.errors import ConfigError
from headrace_engine.connector.layer_groups import LayerGroup
from headrace_kv.layout import (
    STATE,
    TOKEN_OUTER,
    TOKENS,
    CacheGroup,
    Part,
    RankMemory,
    Region,
)
from headrace_kv.shard_map import heads_held

if TYPE_CHECKING:
    from torch import Tensor


WHOLE_BLOCKS = "vllm-blocks"
"""The block_format of blocks with separate tokens that are only transferred whole."""

BlockInterior = Callable[["Tensor", int], str]
"""How the attention kernels pack a block of a layer's tensor, given its block_tokens."""


@dataclass(frozen=True, slots=True)
class Arena:
    """One allocation that holds the caches of a stage's layers, in regions by layer."""

    base_address: int
    arena_bytes: int
    groups: tuple[CacheGroup, ...]
    regions: tuple[Region, ...]


def describe_arena(
    kv_caches: Mapping[str, Tensor],
    groups: Sequence[LayerGroup],
    *,
    rank: int,
    tensor_parallel_size: int,
    block_format_of: BlockInterior,
) -> Arena:
    """Takes tensors of shape [blocks, heads, tokens, channels], or [blocks, 1, 1, bytes] for states, on any device.

    Where single tokens can be copied, heads and tokens may lie in either order. A model with states needs heads outside
    tokens, because its blocks are transferred whole: unused bytes of a block may hold an old state.
    `rank` is that in the stage. A group without layers in the stage has no parts.
    Raises ConfigError for other tensors, for tensors that differ within a group, or for several allocations.
    """
    if not kv_caches:
        raise ConfigError(
            "a pipeline stage has no layer with a cache: lower pipeline_parallel_size",
            metadata={"field": "pipeline_parallel_size"},
        )
    storages = {tensor.untyped_storage().data_ptr() for tensor in kv_caches.values()}
    if len(storages) != 1:
        raise _refusal("layers in separate allocations")
    base = storages.pop()
    has_states = any(group.kind == STATE for group in groups)
    cache_groups: list[CacheGroup] = []
    regions: list[Region] = []
    for group in groups:
        tensors = [kv_caches[name] for _, name in group.layers]
        if group.state_parts:
            held = heads_held(rank, tensor_parallel_size, group.head_count)
            for (number, name), tensor in zip(group.layers, tensors, strict=True):
                regions += _state_regions(number, name, group, tensor, base, len(held))
            cache_groups.append(_state_group(group))
            continue
        parts = {
            _part(group, name, kv_caches[name], block_format_of, has_states)
            for _, name in group.layers
        }
        if len(parts) > 1 or len({tensor.shape for tensor in tensors}) > 1:
            raise _refusal(f"layers of group {group.name} with caches of different sizes")
        held = heads_held(rank, tensor_parallel_size, group.head_count)
        for (number, name), tensor in zip(group.layers, tensors, strict=True):
            if tensor.shape[1] != len(held):
                raise _refusal(
                    f"{tensor.shape[1]} heads on rank {rank} in {name} instead of {len(held)}"
                )
            regions.extend(_region(number, part, group, tensor, base) for part in parts)
        cache_groups.append(
            CacheGroup(
                name=group.name,
                layers=tuple(number for number, _ in group.layers),
                kind=group.kind,
                head_count=group.head_count,
                block_tokens=group.block_tokens if group.kind == TOKENS else 0,
                parts=tuple(parts),
                window_tokens=group.window_tokens,
                chunk_tokens=group.chunk_tokens,
            )
        )
    return Arena(
        base_address=base,
        arena_bytes=next(iter(kv_caches.values())).untyped_storage().nbytes(),
        groups=tuple(cache_groups),
        regions=tuple(regions),
    )


def _state_group(group: LayerGroup) -> CacheGroup:
    return CacheGroup(
        name=group.name,
        layers=tuple(number for number, _ in group.layers),
        kind=STATE,
        head_count=group.head_count,
        block_tokens=0,
        parts=tuple(
            Part(part.name, part.dtype, part.unit_bytes, group.block_format)
            for part in group.state_parts
        ),
    )


def _state_regions(
    number: int, name: str, group: LayerGroup, tensor: Tensor, base: int, heads: int
) -> list[Region]:
    """The regions of a layer with pages of bytes, [blocks, 1, 1, bytes]."""
    element_bytes = tensor.element_size()
    last = group.state_parts[-1]
    page_bytes = tensor.shape[3] * element_bytes if tensor.dim() == 4 else 0
    if last.offset_bytes + heads * last.unit_bytes > page_bytes or tensor.shape[1] != 1:
        raise _refusal(_described(name, tensor, 1))
    return [
        Region(
            layer=number,
            part=part.name,
            offset_bytes=tensor.data_ptr() - base + part.offset_bytes,
            block_count=tensor.shape[0],
            head_count=heads,
            block_tokens=0,
            unit_bytes=part.unit_bytes,
            block_stride_bytes=tensor.stride(0) * element_bytes,
            head_stride_bytes=part.unit_bytes,
            token_stride_bytes=0,
        )
        for part in group.state_parts
    ]


def _part(
    group: LayerGroup,
    name: str,
    tensor: Tensor,
    block_format_of: BlockInterior,
    has_states: bool,
) -> Part:
    tokens = group.block_tokens if group.kind == TOKENS else 1
    if tensor.dim() == 4 and tokens > tensor.shape[2] and tokens % tensor.shape[2] == 0:
        raise ConfigError(
            f"blocks hold {tokens} tokens, but the attention kernels of {name} use {tensor.shape[2]}: "
            f"set block_size to {tensor.shape[2]}",
            metadata={"field": "block_size"},
        )
    if tensor.dim() != 4 or tensor.stride(3) != 1 or tensor.shape[2] != tokens:
        raise _refusal(_described(name, tensor, tokens))
    block_format = group.block_format or block_format_of(tensor, tokens)
    if block_format == TOKEN_OUTER and has_states:
        block_format = WHOLE_BLOCKS
        if tensor.stride(2) != tensor.shape[3]:
            raise ConfigError(
                f"{name} keeps heads inside tokens, but a model with states needs blocks that can be sent whole: set "
                "VLLM_KV_CACHE_LAYOUT=HND",
                metadata={"field": "model"},
            )
    if block_format != TOKEN_OUTER and tensor.stride(2) != tensor.shape[3]:
        raise _refusal(_described(name, tensor, tokens))
    token_bytes = tensor.shape[3] * tensor.element_size()
    return Part(
        name="state" if group.kind == STATE else "kv",
        dtype=str(tensor.dtype).removeprefix("torch."),
        unit_bytes=token_bytes if block_format == TOKEN_OUTER else token_bytes * tokens,
        block_format=block_format,
    )


def _described(name: str, tensor: Tensor, tokens: int) -> str:
    return f"a cache of shape {tuple(tensor.shape)} and strides {tensor.stride()} in {name}, {tokens} tokens to a block"


def _region(number: int, part: Part, group: LayerGroup, tensor: Tensor, base: int) -> Region:
    element_bytes = tensor.element_size()
    return Region(
        layer=number,
        part=part.name,
        offset_bytes=tensor.data_ptr() - base,
        block_count=tensor.shape[0],
        head_count=tensor.shape[1],
        block_tokens=group.block_tokens if group.kind == TOKENS else 0,
        unit_bytes=part.unit_bytes,
        block_stride_bytes=tensor.stride(0) * element_bytes,
        head_stride_bytes=tensor.stride(1) * element_bytes,
        token_stride_bytes=tensor.stride(2) * element_bytes
        if part.block_format == TOKEN_OUTER
        else 0,
    )


def rank_memory(arena: Arena, *, rank: int, transport: str, session: str) -> RankMemory:
    """The rank's registered memory."""
    return RankMemory(
        rank=rank,
        transport=transport,
        session=session,
        base_address=arena.base_address,
        arena_bytes=arena.arena_bytes,
        regions=arena.regions,
    )


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"the model has {what}, which Headrace cannot transfer: serve another model",
        metadata={"field": "model"},
    )


@dataclass(frozen=True, slots=True)
class StageLayers:
    """The groups of the whole model, and the number of each stage's first layer."""

    groups: tuple[CacheGroup, ...]
    stage_starts: tuple[int, ...]

    def in_model(self, arena: Arena, stage: int) -> Arena:
        """A stage's arena with all groups, and with the numbers that its layers have in the whole model."""
        first = self.stage_starts[stage]
        regions = tuple(replace(one, layer=first + one.layer) for one in arena.regions)
        return replace(arena, groups=self.groups, regions=regions)


def join_stages(stages: Sequence[Sequence[CacheGroup]]) -> StageLayers:
    """Takes each stage's groups, with its layers numbered from 0.

    Raises ConfigError when a group differs between stages in anything but its layers.
    """
    counts = [sum(len(group.layers) for group in groups) for groups in stages]
    starts = tuple(accumulate(counts[:-1], initial=0))
    return StageLayers(
        tuple(_join(of_stages, starts) for of_stages in zip(*stages, strict=True)), starts
    )


def _join(of_stages: Sequence[CacheGroup], starts: Sequence[int]) -> CacheGroup:
    layers = tuple(
        start + layer
        for start, group in zip(starts, of_stages, strict=True)
        for layer in group.layers
    )
    # A group without layers in a stage has no parts there.
    found = {replace(group, layers=layers) for group in of_stages if group.layers}
    if len(found) != 1:
        raise ConfigError(
            f"the caches of group {of_stages[0].name} differ between pipeline stages: set pipeline_parallel_size to 1",
            metadata={"field": "pipeline_parallel_size"},
        )
    return found.pop()
