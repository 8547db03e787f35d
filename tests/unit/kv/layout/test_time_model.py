"""Bytes of KV and the time of their transfer."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_common.errors import ConfigError
from headrace_kv.layout.time_model import kv_shape

DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "torch_dtype": "bfloat16",
}
GQA: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "float16",
}


@pytest.mark.parametrize(
    "changes,attention,token_bytes",
    [
        ({}, "gqa", 2 * 8 * 128 * 2 * 32),
        ({"head_dim": 64}, "gqa", 2 * 8 * 64 * 2 * 32),
        ({"num_key_value_heads": None}, "gqa", 2 * 32 * 128 * 2 * 32),
        ({"torch_dtype": "float32"}, "gqa", 2 * 8 * 128 * 4 * 32),
        ({"torch_dtype": None, "dtype": "float32"}, "gqa", 2 * 8 * 128 * 4 * 32),
        ({"layer_types": ["full_attention", "linear_attention"] * 16}, "gqa", 2 * 8 * 128 * 2 * 16),
        ({"text_config": {"num_hidden_layers": 2}}, "gqa", 2 * 8 * 128 * 2 * 2),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "mla", 576 * 2 * 32),
    ],
)
def test_a_token_s_bytes(changes: dict[str, Any], attention: str, token_bytes: int) -> None:
    shape = kv_shape({**GQA, **changes})
    assert (shape.attention, shape.token_bytes) == (attention, token_bytes)


def test_another_type_of_the_cache_replaces_the_model_s() -> None:
    assert kv_shape(DEEPSEEK_V3, "fp8").token_bytes == 61 * 576


@pytest.mark.parametrize(
    "changes,dtype,named",
    [
        ({"num_hidden_layers": 0}, "", "num_hidden_layers"),
        ({"num_hidden_layers": "32"}, "", "num_hidden_layers"),
        ({"num_hidden_layers": True}, "", "num_hidden_layers"),
        ({"num_hidden_layers": 1 << 40}, "", "num_hidden_layers"),
        ({"num_attention_heads": None}, "", "num_attention_heads"),
        ({"hidden_size": None}, "", "hidden_size"),
        ({"kv_lora_rank": 512}, "", "qk_rope_head_dim"),
        ({}, "int3", "int3"),
        ({"layer_types": ["mamba"] * 32}, "", "layer_types"),
    ],
)
def test_a_config_that_is_none_is_refused_by_field(
    changes: dict[str, Any], dtype: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        kv_shape({**GQA, **changes}, dtype)
