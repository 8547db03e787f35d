"""Reads vLLM's KV cache groups: layers that share a block list, and the contents of their blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from headrace_common.errors import ConfigError
from headrace_engine.vllm.compat import in_model_order
from headrace_engine.vllm.step.groups import LayerGroup
from headrace_kv.layout.layout import STATE, TOKEN_OUTER, TOKENS, GroupKind

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def read_groups(
    kv_cache_config: KVCacheConfig, *, kv_head_count: int, tensor_parallel_size: int
) -> tuple[LayerGroup, ...]:
    """The groups of a model: first those with tokens, then states.

    Raises ConfigError for layers with a cache that Headrace cannot transfer.
    """
    specs = [_one_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    has_states = any(isinstance(spec, MambaSpec) for spec in specs)
    numbers = _layer_numbers(kv_cache_config)
    found: list[LayerGroup] = []
    for index, (group, spec) in enumerate(zip(kv_cache_config.kv_cache_groups, specs, strict=True)):
        kind: GroupKind = TOKENS
        head_count, block_format = kv_head_count, ""
        if isinstance(spec, MambaSpec):
            kind, block_format = STATE, _state_block_format(spec)
            # A page holds a rank's share of several arrays, and cannot be split for other numbers of ranks.
            head_count = 1 if spec.tp_replicated else tensor_parallel_size
        elif type(spec) is MLAAttentionSpec:
            # Beside states, blocks are transferred whole: unused bytes of a block may hold an old state.
            head_count, block_format = 1, "vllm-latent" if has_states else TOKEN_OUTER
        elif type(spec) is not FullAttentionSpec:
            raise _refusal(f"layers that keep a {type(spec).__name__}")
        name = "state" if kind == STATE else "attention"
        before = sum(other.kind == kind for other in found)
        found.append(
            LayerGroup(
                index=index,
                name=f"{name}.{before}" if before else name,
                kind=kind,
                head_count=head_count,
                block_tokens=spec.block_size,
                block_format=block_format,
                layers=tuple(
                    sorted((numbers[layer_name], layer_name) for layer_name in group.layer_names)
                ),
                page_bytes=spec.page_size_bytes,
            )
        )
    return tuple(sorted(found, key=lambda group: group.kind == STATE))


def _layer_numbers(kv_cache_config: KVCacheConfig) -> Mapping[str, int]:
    """Numbers of the layers of all groups, in model order. A layer with two caches has two numbers."""
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    return {name: number for number, name in enumerate(in_model_order(names))}


def _one_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec that all layers of a group share."""
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    of_layers = list(spec.kv_cache_specs.values())
    if any(other != of_layers[0] for other in of_layers):
        raise _refusal("layers of one group with caches of different sizes")
    return of_layers[0]


def _state_block_format(spec: MambaSpec) -> str:
    arrays = "+".join(
        f"{'x'.join(map(str, shape))}:{str(dtype).removeprefix('torch.')}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    return f"vllm-{spec.mamba_type.name.lower()}-{arrays}"


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"the model has {what}, which Headrace cannot transfer: serve a model with full or latent attention, "
        "short convolutions or states",
        metadata={"field": "model"},
    )
