"""Conversion of vLLM's cache groups, from its own specs. Starts no engine."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.vllm.step.groups import LayerGroup
from headrace_kv.layout.layout import STATE, TOKEN_OUTER, TOKENS
from tests.vllm.conftest import IMPORTS_VLLM

pytestmark = IMPORTS_VLLM

ATTENTION = {"block_size": 32, "num_kv_heads": 2, "head_size": 32}


def groups_of(*found: tuple[list[str], Any], ranks: int = 2) -> tuple[LayerGroup, ...]:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from headrace_engine.vllm.cache_groups import read_groups

    config = KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(names, spec) for names, spec in found],
    )
    return read_groups(config, kv_head_count=4, tensor_parallel_size=ranks)


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
    # A rank's page of a state is its own, unless all ranks keep the same.
    assert [group.head_count for group in found] == [4, 2, 1]
    assert found[0].block_format == ""
    assert found[1].block_format == "vllm-mamba2-3x8:bfloat16+2x4x4:float32"


def test_tokens_of_latent_attention_are_separate_except_beside_states() -> None:
    latent = spec("MLAAttentionSpec", num_kv_heads=1, head_size=576, block_size=16)
    (alone,) = groups_of((["m.0.attn"], latent))
    assert (alone.head_count, alone.block_format) == (1, TOKEN_OUTER)
    beside, _ = groups_of((["m.0.attn"], latent), (["m.1.conv"], state_spec()))
    assert beside.block_format not in ("", TOKEN_OUTER)


@pytest.mark.parametrize("name", ["SlidingWindowSpec", "ChunkedLocalAttentionSpec"])
def test_layers_that_free_blocks_early_are_rejected(name: str) -> None:
    field = "sliding_window" if name == "SlidingWindowSpec" else "attention_chunk_size"
    with pytest.raises(ConfigError, match=name):
        groups_of((["m.0.attn"], spec(name, **{field: 64})))
