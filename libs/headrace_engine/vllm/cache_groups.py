"""Reads vLLM's KV cache groups: layers that share a block list, and the contents of their blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
from headrace_engine.connector.layer_groups import (
    LayerGroup,
    StateArray,
    StateHeads,
    StatePart,
    state_heads,
)
from headrace_engine.vllm.compat import in_model_order
from headrace_engine.vllm.drafts import DraftModel
from headrace_kv.layout import STATE, TOKEN_OUTER, TOKENS, GroupKind

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class _Cache:
    """A cache of a group's layers. A page of a state may count as two, when ranks divide parts of it differently."""

    kind: GroupKind
    head_count: int
    block_format: str
    state_parts: tuple[StatePart, ...] = ()


@dataclass(frozen=True, slots=True)
class _Layers:
    """Layers of vLLM's group `index`: those of the model, or of its draft."""

    index: int
    names: tuple[str, ...]
    spec: KVCacheSpec
    is_draft: bool


def read_groups(
    kv_cache_config: KVCacheConfig,
    *,
    kv_head_count: int,
    tensor_parallel_size: int,
    state_group_count: int = 0,
    stage_layers_max: int = 0,
    draft: DraftModel | None = None,
) -> tuple[LayerGroup, ...]:
    """The groups of a model: first those with all tokens, then those with windows, then states. Each has those of the
    draft last.

    `state_group_count`: see state_heads. `stage_layers_max`: see LayerGroup. Raises ConfigError for layers with a cache
    that Headrace cannot transfer.
    """
    groups = _divided(kv_cache_config, draft)
    has_states = any(isinstance(group.spec, MambaSpec) for group in groups)
    if draft is not None and has_states:
        # Beside drafts, vLLM keeps a state for each of them.
        raise _refusal("states, and a draft model")
    caches = [
        _state_caches(group.spec, tensor_parallel_size, state_group_count)
        if isinstance(group.spec, MambaSpec)
        else (
            _token_cache(
                group.spec,
                draft.kv_head_count if draft is not None and group.is_draft else kv_head_count,
                tensor_parallel_size,
                has_states,
            ),
        )
        for group in groups
    ]
    numbers = _layer_numbers(groups, caches)
    found: list[LayerGroup] = []
    for group, of_group in zip(groups, caches, strict=True):
        spec = group.spec
        window_tokens, chunk_tokens = _window(spec)
        for place, cache in enumerate(of_group):
            is_windowed = bool(window_tokens or chunk_tokens)
            found.append(
                LayerGroup(
                    index=group.index,
                    name=_name(cache.kind, is_windowed, group.is_draft, found),
                    kind=cache.kind,
                    head_count=cache.head_count,
                    block_tokens=spec.block_size,
                    block_format=cache.block_format,
                    layers=tuple(sorted((numbers[name] + place, name) for name in group.names)),
                    page_bytes=spec.page_size_bytes,
                    window_tokens=window_tokens,
                    chunk_tokens=chunk_tokens,
                    state_parts=cache.state_parts,
                    stage_layers_max=stage_layers_max,
                )
            )
    if all(group.chunk_tokens for group in found):
        raise _refusal("chunked local attention alone")
    if has_states and any(group.is_windowed for group in found):
        # Decode's other groups may have cached more than its windows, see supports_divergent_local_hybrid_hits.
        raise _refusal("windows beside states")
    return tuple(sorted(found, key=lambda group: (group.kind == STATE, group.is_windowed)))


def _divided(kv_cache_config: KVCacheConfig, draft: DraftModel | None) -> list[_Layers]:
    """vLLM's groups, each divided in layers of the model and of its draft. First those of the model."""
    found: list[_Layers] = []
    for is_draft in (False, True):
        for index, group in enumerate(kv_cache_config.kv_cache_groups):
            names = tuple(
                name
                for name in group.layer_names
                if (draft is not None and draft.has(name)) == is_draft
            )
            if names or not (is_draft or group.layer_names):
                found.append(_Layers(index, names, _one_spec(group.kv_cache_spec, names), is_draft))
    if draft is not None and not found[-1].is_draft:
        raise _refusal("a draft model without layers of its own")
    return found


def _name(kind: GroupKind, is_windowed: bool, is_draft: bool, others: Sequence[LayerGroup]) -> str:
    name = "state" if kind == STATE else "window" if is_windowed else "attention"
    if is_draft:
        name = f"draft-{name}"
    before = sum(other.name.partition(".")[0] == name for other in others)
    return f"{name}.{before}" if before else name


def _token_cache(
    spec: KVCacheSpec, kv_head_count: int, tensor_parallel_size: int, has_states: bool
) -> _Cache:
    window_tokens, chunk_tokens = _window(spec)
    if chunk_tokens and kv_head_count < tensor_parallel_size:
        # At the end of a chunk nothing of these layers is sent, and a rank must have something to send.
        raise _refusal(f"chunked local attention with {kv_head_count} KV heads, fewer than ranks")
    if type(spec) is MLAAttentionSpec:
        # Beside states, blocks are transferred whole: unused bytes of a block may hold an old state.
        return _Cache(TOKENS, 1, "vllm-latent" if has_states else TOKEN_OUTER)
    if not window_tokens and not chunk_tokens and type(spec) is not FullAttentionSpec:
        raise _refusal(f"layers that keep a {type(spec).__name__}")
    return _Cache(TOKENS, kv_head_count, "")


def _state_caches(spec: MambaSpec, ranks: int, group_count: int) -> tuple[_Cache, ...]:
    kind = spec.mamba_type.name.lower()
    divided = _heads_of(spec, kind, ranks, group_count)
    if divided:
        # The parts have the sizes.
        return tuple(
            _Cache(STATE, heads.head_count, f"vllm-{kind}-heads", heads.parts) for heads in divided
        )
    arrays = "+".join(
        f"{'x'.join(map(str, shape))}:{str(dtype).removeprefix('torch.')}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    # A page is one piece, which ranks of another number cannot hold.
    return (_Cache(STATE, 1 if spec.tp_replicated else ranks, f"vllm-{kind}-{arrays}"),)


def _window(spec: KVCacheSpec) -> tuple[int, int]:
    """The window and the chunk that a token attends to, 0 for none. vLLM frees the blocks before them."""
    if type(spec) is SlidingWindowSpec and not spec.extra_retained_tokens:
        return spec.sliding_window, 0
    if type(spec) is ChunkedLocalAttentionSpec:
        return 0, spec.attention_chunk_size
    return 0, 0


def _layer_numbers(
    groups: Sequence[_Layers], caches: Sequence[Sequence[_Cache]]
) -> Mapping[str, int]:
    """The first number of each layer, in model order, and then of the draft's. A layer with two caches has two."""
    counts = {
        name: len(found)
        for group, found in zip(groups, caches, strict=True)
        for name in group.names
    }
    names = [
        name
        for is_draft in (False, True)
        for name in in_model_order(
            name for group in groups if group.is_draft == is_draft for name in group.names
        )
    ]
    firsts = accumulate((counts[name] for name in names), initial=0)
    return dict(zip(names, firsts, strict=False))


def _one_spec(spec: KVCacheSpec, names: Sequence[str]) -> KVCacheSpec:
    """The spec that these layers of a group share."""
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    of_layers = [spec.kv_cache_specs[name] for name in names]
    if any(other != of_layers[0] for other in of_layers):
        raise _refusal("layers of one group with caches of different sizes")
    return of_layers[0]


def _heads_of(spec: MambaSpec, kind: str, ranks: int, group_count: int) -> tuple[StateHeads, ...]:
    if spec.tp_replicated:
        return ()
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


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"the model has {what}, which Headrace cannot transfer: serve a model with full, latent or sliding-window "
        "attention, short convolutions or states",
        metadata={"field": "model"},
    )
