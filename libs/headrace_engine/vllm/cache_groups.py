"""Reads vLLM's KV cache groups: layers that share a block list, and the contents of their blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from headrace_common.errors import ConfigError
from headrace_engine.vllm.compat import in_model_order
from headrace_engine.vllm.state_parts import DIVIDED_KINDS, StateArray, StateHeads, state_heads
from headrace_engine.vllm.step.groups import LayerGroup
from headrace_kv.layout.layout import STATE, TOKEN_OUTER, TOKENS, GroupKind

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def read_groups(
    kv_cache_config: KVCacheConfig,
    *,
    kv_head_count: int,
    tensor_parallel_size: int,
    state_group_count: int = 0,
) -> tuple[LayerGroup, ...]:
    """The groups of a model: first those with all tokens, then those with windows, then states.

    `state_group_count`: see state_heads. Raises ConfigError for layers with a cache that Headrace cannot transfer.
    """
    specs = [_one_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    has_states = any(isinstance(spec, MambaSpec) for spec in specs)
    numbers = _layer_numbers(kv_cache_config)
    found: list[LayerGroup] = []
    for index, (group, spec) in enumerate(zip(kv_cache_config.kv_cache_groups, specs, strict=True)):
        kind: GroupKind = TOKENS
        head_count, block_format = kv_head_count, ""
        window_tokens, chunk_tokens = _window(spec)
        state: StateHeads | None = None
        if isinstance(spec, MambaSpec):
            kind = STATE
            state = _heads_of(spec, tensor_parallel_size, state_group_count)
            block_format = _state_block_format(spec, divided=state is not None)
            # Otherwise a page is one piece, which ranks of another number cannot hold.
            head_count = 1 if spec.tp_replicated else tensor_parallel_size
            if state is not None:
                head_count = state.head_count
        elif type(spec) is MLAAttentionSpec:
            # Beside states, blocks are transferred whole: unused bytes of a block may hold an old state.
            head_count, block_format = 1, "vllm-latent" if has_states else TOKEN_OUTER
        elif not window_tokens and not chunk_tokens and type(spec) is not FullAttentionSpec:
            raise _refusal(f"layers that keep a {type(spec).__name__}")
        if chunk_tokens and kv_head_count < tensor_parallel_size:
            # At the end of a chunk nothing of these layers is sent, and a rank must have something to send.
            raise _refusal(
                f"chunked local attention with {kv_head_count} KV heads, fewer than ranks"
            )
        name = (
            "state" if kind == STATE else "window" if window_tokens or chunk_tokens else "attention"
        )
        before = sum(other.name.partition(".")[0] == name for other in found)
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
                window_tokens=window_tokens,
                chunk_tokens=chunk_tokens,
                state_parts=state.parts if state is not None else (),
            )
        )
    if all(group.chunk_tokens for group in found):
        raise _refusal("chunked local attention alone")
    if has_states and any(group.is_windowed for group in found):
        # Decode's other groups may have cached more than its windows, see supports_divergent_local_hybrid_hits.
        raise _refusal("windows beside states")
    return tuple(sorted(found, key=lambda group: (group.kind == STATE, group.is_windowed)))


def _window(spec: KVCacheSpec) -> tuple[int, int]:
    """The window and the chunk that a token attends to, 0 for none. vLLM frees the blocks before them."""
    if type(spec) is SlidingWindowSpec and not spec.extra_retained_tokens:
        return spec.sliding_window, 0
    if type(spec) is ChunkedLocalAttentionSpec:
        return 0, spec.attention_chunk_size
    return 0, 0


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


def _heads_of(spec: MambaSpec, ranks: int, group_count: int) -> StateHeads | None:
    kind = spec.mamba_type.name.lower()
    if spec.tp_replicated or kind not in DIVIDED_KINDS:
        return None
    arrays = [
        StateArray(tuple(shape), str(dtype).removeprefix("torch."), dtype.itemsize)
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    return state_heads(
        kind,
        arrays,
        ranks=ranks,
        group_count=group_count,
        channels_first=is_conv_state_dim_first(),
    )


def _state_block_format(spec: MambaSpec, *, divided: bool) -> str:
    if divided:
        # The parts have the sizes.
        return f"vllm-{spec.mamba_type.name.lower()}-heads"
    arrays = "+".join(
        f"{'x'.join(map(str, shape))}:{str(dtype).removeprefix('torch.')}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    return f"vllm-{spec.mamba_type.name.lower()}-{arrays}"


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"the model has {what}, which Headrace cannot transfer: serve a model with full, latent or sliding-window "
        "attention, short convolutions or states",
        metadata={"field": "model"},
    )
