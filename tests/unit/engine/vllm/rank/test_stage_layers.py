"""The groups of several pipeline stages as those of one model, without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.connector.layer_groups import LayerGroup
from headrace_engine.vllm.rank.memory import Arena, describe_arena, join_stages
from headrace_kv.layout import STATE, TOKENS
from tests.unit.engine.vllm.rank.test_memory import describe, group, tensor


def stage(*layers_of_groups: tuple[str, ...]) -> Arena:
    """The arena of a stage with layers l0, l1 ... in model order: a group of tokens, and one of states."""
    pages = {"shape": (8, 1, 1, 1000), "strides": (12288, 12288, 1000, 1)}
    tokens, states = layers_of_groups
    count = len(tokens) + len(states)
    tensors = [
        tensor(number, **(pages if f"l{number}" in states else {})) for number in range(count)
    ]
    return describe(*tensors, groups=groups(tokens, states))


def groups(tokens: tuple[str, ...], states: tuple[str, ...]) -> list[LayerGroup]:
    of_states: dict[str, Any] = {"head_count": 1, "block_format": "state"}
    return [group(TOKENS, tokens, index=0), group(STATE, states, index=1, **of_states)]


def test_a_group_without_layers_in_a_stage_is_known_from_the_others() -> None:
    first, second = stage(("l0", "l1"), ()), stage(("l0",), ("l1",))
    assert first.groups[1].parts == ()
    joined = join_stages([first.groups, second.groups])
    assert [one.layers for one in joined.groups] == [(0, 1, 2), (3,)]
    assert joined.groups[1].parts == second.groups[1].parts != ()


def test_one_stage_stays_as_it_is() -> None:
    arena = stage(("l0", "l2"), ("l1",))
    joined = join_stages([arena.groups])
    assert joined.in_model(arena, 0) == arena
    assert joined.stage_starts == (0,)


def test_stages_with_other_caches_are_refused() -> None:
    first = stage(("l0",), ("l1",))
    other = replace(first.groups[0], block_tokens=64)
    with pytest.raises(ConfigError, match=r"group\.0 differ between pipeline stages") as caught:
        join_stages([first.groups, (other, first.groups[1])])
    assert caught.value.metadata["field"] == "pipeline_parallel_size"


def test_a_stage_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower pipeline_parallel_size"):
        describe_arena(
            {}, [], rank=0, tensor_parallel_size=1, block_format_of=lambda cache, tokens: ""
        )
