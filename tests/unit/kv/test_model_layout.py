"""The KV of a model by its config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace_common.errors import ConfigError
from headrace_kv.model_layout import ModelConfig, kv_layout, prompt_bytes

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "bench" / "simulation" / "configs"
SMALL = {"num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}


def config_of(name: str) -> ModelConfig:
    return ModelConfig.of(json.loads((CONFIGS / f"{name}.json").read_text()))


def layout_of(**fields: Any) -> Any:
    return kv_layout(ModelConfig.of({**SMALL, **fields}))


def test_latent_attention_has_the_bytes_that_capacity_planning_shows() -> None:
    page = (ROOT / "docs" / "operations" / "capacity.md").read_text()
    rows = re.findall(r"\| ([\d,]+) \| ([\d,.]+) MiB \|", page)
    assert len(rows) == 3
    layout = kv_layout(config_of("deepseek-v3"), 8)
    for tokens, size in rows:
        found = prompt_bytes(layout, int(tokens.replace(",", ""))) / (1 << 20)
        assert f"{found:,.2f}" in (size, f"{float(size.replace(',', '')) - 0.01:,.2f}")


def test_grouped_heads_have_a_key_and_a_value_each() -> None:
    layout = kv_layout(config_of("llama-3.3-70b"))
    assert layout.token_bytes == 2 * 8 * 128 * 2 * 80
    assert prompt_bytes(layout, 1_000) == 1_000 * layout.token_bytes


def test_windows_send_only_what_the_next_token_attends_to() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    whole = layout_of()
    slides = layout_of(layer_types=kinds, sliding_window=64)
    assert [group.window_tokens for group in slides.groups] == [0, 64]
    assert prompt_bytes(slides, 60) == prompt_bytes(whole, 60)
    half = prompt_bytes(whole, 1_000) // 2
    assert half < prompt_bytes(slides, 1_000) <= half + half * (64 + 16) // 1_000
    by_period = layout_of(sliding_window_pattern=2, sliding_window=64)
    assert by_period.groups == slides.groups
    chunks = layout_of(layer_types=["chunked_attention"] * 4, attention_chunk_size=64)
    assert prompt_bytes(chunks, 128) == 0


def test_a_state_does_not_grow_with_the_prompt() -> None:
    layout = layout_of(layer_types=["conv"] * 3 + ["full_attention"], conv_L_cache=3)
    state = 3 * 128 * 2 * 2
    assert prompt_bytes(layout, 100) == 100 * layout.token_bytes + state
    assert prompt_bytes(layout, 200) == 200 * layout.token_bytes + state


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_attention_heads": "4"}, "num_attention_heads is 4"),
        ({"text_config": 4}, "text_config is 4; it must be an object"),
        ({"head_dim": None, "hidden_size": 2}, "head_dim is missing"),
        ({"layer_types": 4}, "layer_types must name"),
        ({"layer_types": ["rwkv", []] * 2}, "layer_types must name"),
        ({"layer_types": ["full_attention"]}, "layer_types must name"),
        ({"hybrid_override_pattern": "M*M*"}, "layer_types must name"),
        ({"sliding_window": 64}, "layer_types must name"),
        ({"dtype": "int4"}, "dtype is int4"),
    ],
)
def test_a_cache_that_is_not_known_is_refused_by_the_field(
    fields: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(what)):
        layout_of(**fields)
