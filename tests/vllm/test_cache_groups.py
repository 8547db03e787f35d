"""Conversion of vLLM's cache groups, from its own specs. Starts no engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.connector.tier_planner import plan_tiers
from headrace_engine.vllm.drafts import DraftModel
from headrace_kv.layout import STATE, TOKEN_OUTER, TOKENS, CacheGroup
from headrace_kv.tiers.tiers import TierSettings
from tests.vllm.conftest import IMPORTS_VLLM

pytestmark = IMPORTS_VLLM

ATTENTION = {"block_size": 32, "num_kv_heads": 2, "head_size": 32}
BEFORE_AFTER = ("before", "after")


def groups_of(
    *found: tuple[list[str], Any],
    ranks: int = 2,
    state_groups: int = 0,
    draft: DraftModel | None = None,
) -> tuple[LayerGroup, ...]:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from headrace_engine.vllm.cache_groups import read_groups

    config = KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(names, spec) for names, spec in found],
    )
    return read_groups(
        config,
        kv_head_count=4,
        tensor_parallel_size=ranks,
        state_group_count=state_groups,
        draft=draft,
    )


def state_spec(**changes: Any) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    shapes, dtypes = ((3, 8), (2, 4, 4)), (torch.bfloat16, torch.float32)
    return MambaSpec(block_size=32, shapes=shapes, dtypes=dtypes, **changes)


def spec(name: str, **changes: Any) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface

    values = ATTENTION | {"dtype": torch.float32} | changes
    return getattr(kv_cache_interface, name)(**values)


def test_groups_with_tokens_come_first_and_layers_keep_the_models_order() -> None:
    found = groups_of(
        (["m.0.conv", "m.3.conv"], state_spec()),
        (["m.2.conv"], state_spec(tp_replicated=True)),
        (["m.1.attn", "m.4.attn"], spec("FullAttentionSpec")),
    )
    assert [(g.index, g.name, g.kind) for g in found] == [
        (2, "attention", TOKENS),
        (0, "state", STATE),
        (1, "state.1", STATE),
    ]
    assert [[number for number, _ in group.layers] for group in found] == [[1, 4], [0, 3], [2]]
    # A rank's page of this state cannot be divided. It is its own, unless all ranks keep the same.
    assert [group.head_count for group in found] == [4, 2, 1]
    assert not found[1].state_parts
    assert found[0].block_format == ""
    assert found[1].block_format == "vllm-mamba2-3x8:bfloat16+2x4x4:float32"


def states_of(
    kind: str, shapes: tuple[tuple[int, ...], ...], ranks: int, groups: int = 0
) -> tuple[LayerGroup, ...]:
    import torch
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
    from vllm.v1.kv_cache_interface import MambaSpec

    found = MambaSpec(
        block_size=32,
        shapes=shapes,
        dtypes=(torch.bfloat16, torch.float32)[: len(shapes)],
        mamba_type=MambaAttentionBackendEnum[kind],
    )
    return groups_of((["m.0.state", "m.1.state"], found), ranks=ranks, state_groups=groups)


def units(group: LayerGroup) -> list[tuple[str, int]]:
    return [(part.name, part.unit_bytes) for part in group.state_parts]


def test_a_short_convolution_has_heads() -> None:
    (one,), (two,) = (
        states_of("SHORT_CONV", ((2, 128 // ranks),), ranks=ranks) for ranks in (1, 2)
    )
    assert one.head_count == two.head_count == 64
    assert units(one) == units(two) == [("input.0", 4), ("input.1", 4)]
    assert one.block_format == two.block_format == "vllm-short_conv-heads"
    assert 32 * sum(part.unit_bytes for part in two.state_parts) == two.page_bytes


def test_a_delta_net_has_heads() -> None:
    # 2 key heads and 4 value heads of 64 channels over all ranks.
    (one,), (two,) = (
        states_of("GDN_ATTN", ((3, 512 // ranks), (4 // ranks, 64, 64)), ranks=ranks)
        for ranks in (1, 2)
    )
    assert one.head_count == two.head_count == 2
    assert units(one) == units(two)
    assert one.block_format == two.block_format == "vllm-gdn_attn-heads"
    assert sum(part.unit_bytes for part in two.state_parts) == two.page_bytes


def test_a_mamba_state_counts_as_two_caches() -> None:
    """The inputs of the only group are on every rank, and those of 8 heads of 32 channels are divided."""
    one, two = (
        states_of(
            "MAMBA2", ((3, 256 // ranks + 2 * 32), (8 // ranks, 32, 32)), ranks=ranks, groups=1
        )
        for ranks in (1, 2)
    )
    for heads, shared in (one, two):
        assert (heads.name, heads.index, heads.head_count) == ("state", 0, 8)
        assert (shared.name, shared.index, shared.head_count) == ("state.1", 0, 1)
        assert heads.layers == ((0, "m.0.state"), (2, "m.1.state"))
        assert shared.layers == ((1, "m.0.state"), (3, "m.1.state"))
    assert [units(group) for group in one] == [units(group) for group in two]
    assert units(one[1]) == [(f"{name}.{tap}", 64) for tap in range(3) for name in BEFORE_AFTER]
    # A model with unknown groups has pages of one piece.
    (whole,) = states_of("MAMBA2", ((3, 256 + 2 * 32), (8, 32, 32)), ranks=1)
    assert not whole.state_parts


def test_tokens_of_latent_attention_are_separate_except_beside_states() -> None:
    latent = spec("MLAAttentionSpec", num_kv_heads=1, head_size=576, block_size=16)
    (alone,) = groups_of((["m.0.attn"], latent))
    assert (alone.head_count, alone.block_format) == (1, TOKEN_OUTER)
    beside, _ = groups_of((["m.0.attn"], latent), (["m.1.conv"], state_spec()))
    assert beside.block_format not in ("", TOKEN_OUTER)


def window(**changes: Any) -> Any:
    return spec("SlidingWindowSpec", sliding_window=64, **changes)


def chunks(**changes: Any) -> Any:
    return spec("ChunkedLocalAttentionSpec", attention_chunk_size=64, **changes)


def test_windows_follow_the_groups_that_keep_all_tokens() -> None:
    found = groups_of(
        (["m.0.attn"], window()),
        (["m.1.attn"], spec("FullAttentionSpec")),
        (["m.2.attn"], chunks()),
    )
    assert [(g.index, g.name, g.window_tokens, g.chunk_tokens) for g in found] == [
        (1, "attention", 0, 0),
        (0, "window", 64, 0),
        (2, "window.1", 0, 64),
    ]
    assert [g.keeps_all_tokens for g in found] == [True, False, False]
    (alone,) = groups_of((["m.0.attn"], window()))
    assert (alone.name, alone.kind, alone.window_tokens) == ("window", TOKENS, 64)


@pytest.mark.parametrize("end_token", [1, 63, 64, 65, 96, 97, 128, 200])
@pytest.mark.parametrize("make_spec", [window, chunks])
def test_the_blocks_that_are_sent_are_those_that_vllm_keeps(
    make_spec: Callable[[], Any], end_token: int
) -> None:
    """vLLM's null block stands where a request that has computed `end_token` tokens needs none."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import (
        ChunkedLocalAttentionManager,
        SlidingWindowManager,
    )

    kind = SlidingWindowManager if make_spec is window else ChunkedLocalAttentionManager
    pool = BlockPool(64, enable_caching=True, hash_block_size=32)
    manager = kind(
        make_spec(),
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=32,
    )
    manager.add_local_computed_blocks("r", [], 0, end_token)
    manager.allocate_external_computed_blocks("r", 0, end_token)
    held = [not block.is_null for block in manager.req_to_blocks["r"]]
    *_, found = groups_of((["m.0.attn"], spec("FullAttentionSpec")), (["m.1.attn"], make_spec()))
    group = CacheGroup("window", (1,), TOKENS, 4, 32, (), found.window_tokens, found.chunk_tokens)
    first = group.first_sent_token(0, end_token)
    blocks = range(-(-end_token // 32))
    assert held == [block * 32 >= first and first < end_token for block in blocks]


def test_what_windows_cannot_be_used_with_is_refused() -> None:
    with pytest.raises(ConfigError, match="alone"):
        groups_of((["m.0.attn"], chunks()))
    with pytest.raises(ConfigError, match="fewer than ranks"):
        groups_of((["m.0.attn"], spec("FullAttentionSpec")), (["m.1.attn"], chunks()), ranks=8)
    with pytest.raises(ConfigError, match="windows beside states"):
        groups_of((["m.0.attn"], window()), (["m.1.conv"], state_spec()))
    with pytest.raises(ConfigError, match="SlidingWindowSpec"):
        groups_of((["m.0.attn"], window(extra_retained_tokens=2)))
    groups = groups_of((["m.0.attn"], window()))
    with pytest.raises(ConfigError, match="kv_host_gib"):
        plan_tiers(TierSettings(host_gib=1), groups)


def test_layers_of_a_draft_follow_in_groups_of_their_own() -> None:
    """vLLM has them in the model's group. Their heads differ, which only ranks can see."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    draft = DraftModel(kv_head_count=2, target_layer_count=2)
    names = ["draft_model.m.0.attn", "m.0.attn", "draft_model.m.1.attn", "m.1.attn"]
    specs = {
        name: spec("FullAttentionSpec", num_kv_heads=1 if draft.has(name) else 2) for name in names
    }
    on_ranks = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)
    for found in (on_ranks, specs["m.0.attn"]):
        groups = groups_of((names, found), draft=draft)
        with pytest.raises(ConfigError, match="kv_host_gib"):
            plan_tiers(TierSettings(host_gib=1), groups)
        assert [(g.index, g.name, g.head_count, g.keeps_all_tokens) for g in groups] == [
            (0, "attention", 4, True),
            (0, "draft-attention", 2, True),
        ]
        assert [[number for number, _ in group.layers] for group in groups] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.attn", "mtp.layers.0.self_attn.attn"])
def test_layers_of_heads_continue_the_models_numbers(name: str) -> None:
    draft = DraftModel(kv_head_count=4, target_layer_count=2)
    layers = [f"model.layers.{number}.self_attn.attn" for number in range(2)]
    groups = groups_of(([*layers, name], spec("FullAttentionSpec")), draft=draft)
    assert [group.layers for group in groups] == [tuple(enumerate(layers)), ((2, name),)]


def test_what_cannot_be_drafted_for_is_refused() -> None:
    draft = DraftModel(kv_head_count=4, target_layer_count=2)
    attention = spec("FullAttentionSpec")
    with pytest.raises(ConfigError, match="without layers of its own"):
        groups_of((["m.0.attn", "m.1.attn"], attention), draft=draft)
    with pytest.raises(ConfigError, match="states, and a draft model"):
        groups_of((["m.0.attn", "m.2.attn"], attention), (["m.1.conv"], state_spec()), draft=draft)
