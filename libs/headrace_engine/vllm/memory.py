"""Describes a rank's KV tensors as regions of one arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_common.errors import ConfigError
from headrace_kv.layout import KvLayout, RankMemory, Region

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Arena:
    """One allocation that holds every layer's KV cache. `layer_names` are in the model's order."""

    base_address: int
    arena_bytes: int
    block_count: int
    layer_names: tuple[str, ...]
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What one block of one layer holds on this rank."""

    dtype: str
    head_count: int
    block_tokens: int
    head_bytes: int


def describe_arena(
    kv_caches: Mapping[str, Tensor], layer_names: Sequence[str]
) -> tuple[Arena, BlockShape]:
    """Takes tensors of shape [blocks, heads, tokens, channels]; how K and V share a head is the kernels' matter.

    Raises ConfigError when they are anything else, or do not share one allocation.
    """
    tensors = [kv_caches[name] for name in layer_names]
    shapes = {_block_shape(name, tensor) for name, tensor in zip(layer_names, tensors, strict=True)}
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    counts = {tensor.shape[0] for tensor in tensors}
    if len(shapes) != 1 or len(storages) != 1 or len(counts) != 1:
        raise ConfigError(
            "the layers of this model keep their KV in different ways, which Headrace cannot hand over: "
            "serve a model whose layers are all alike",
            metadata={"field": "model"},
        )
    base = storages.pop()
    regions = tuple(
        Region(
            layer=layer,
            part="kv",
            offset_bytes=tensor.data_ptr() - base,
            block_count=tensor.shape[0],
            head_count=tensor.shape[1],
            block_tokens=tensor.shape[2],
            unit_bytes=tensor.shape[2] * tensor.shape[3] * tensor.element_size(),
            block_stride_bytes=tensor.stride(0) * tensor.element_size(),
            head_stride_bytes=tensor.stride(1) * tensor.element_size(),
            token_stride_bytes=0,
        )
        for layer, tensor in enumerate(tensors)
    )
    arena = Arena(
        base_address=base,
        arena_bytes=tensors[0].untyped_storage().nbytes(),
        block_count=counts.pop(),
        layer_names=tuple(layer_names),
        regions=regions,
    )
    return arena, shapes.pop()


def _block_shape(name: str, tensor: Tensor) -> BlockShape:
    if tensor.dim() != 4 or tensor.stride(3) != 1 or tensor.stride(2) != tensor.shape[3]:
        raise ConfigError(
            f"the KV cache of {name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, which Headrace "
            "cannot hand over: serve a model with plain attention",
            metadata={"field": "model", "layer": name},
        )
    return BlockShape(
        dtype=str(tensor.dtype).removeprefix("torch."),
        head_count=tensor.shape[1],
        block_tokens=tensor.shape[2],
        head_bytes=tensor.shape[2] * tensor.shape[3] * tensor.element_size(),
    )


def layout_of(
    arena: Arena,
    shape: BlockShape,
    *,
    fingerprint: str,
    kv_head_count: int,
    tensor_parallel_size: int,
    interior: str,
) -> KvLayout:
    """The worker's layout as a rank sees it: the same on every rank."""
    return KvLayout.attention(
        model=fingerprint,
        dtype=shape.dtype,
        layer_count=len(arena.layer_names),
        kv_head_count=kv_head_count,
        tensor_parallel_size=tensor_parallel_size,
        block_tokens=shape.block_tokens,
        parts={"kv": shape.head_bytes},
        interior=interior,
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
