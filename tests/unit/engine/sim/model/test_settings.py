"""Settings of the sim engine."""

from dataclasses import replace
from typing import Any

import pytest

from headrace_common.errors import ConfigError
from headrace_engine.config import EngineConfig
from headrace_engine.factory import build_engine
from headrace_engine.sim.model.settings import parse_settings, plan_shape
from headrace_kv.layout import WorkerRef

CONFIG = EngineConfig(engine="sim", model="sim", role="decode", ref=WorkerRef("w", "1" * 16))


def test_caches_can_be_given_as_data() -> None:
    text = (
        "sim:layers=2,heads=6,parts=k:16:int8/scale:4:float32,state_layers=1,index_layers=1,"
        "order=block/layer/part/head/token,block_format=token_inner"
    )
    shape = plan_shape(replace(CONFIG, model=text, block_size=32, pipeline_parallel_size=2))
    attention, index, state = shape.groups
    assert attention.layers == (0, 3)
    assert {*index.layers, *state.layers} == {1, 2}
    assert [(part.name, part.unit_bytes) for part in attention.parts] == [
        ("k", 16 * 32),
        ("scale", 4 * 32),
    ]
    assert (state.kind, state.block_tokens, state.parts[0].block_format) == (
        "state",
        0,
        "token_outer",
    )
    assert shape.stage_starts == (0, 2)
    assert shape.block_counts[2] == CONFIG.max_num_seqs


@pytest.mark.parametrize(
    "model, field",
    [
        ("llama", "model"),
        ("simple", "model"),
        ("sim:layers=0", "model.layers"),
        ("sim:layers=two", "model.layers"),
        ("sim:layers", "model.layers"),
        ("sim:colour=4", "model.colour"),
        ("sim:verify=maybe", "model.verify"),
        ("sim:head_bytes=12", "model.head_bytes"),
        ("sim:layer_s=nan", "model.layer_s"),
        ("sim:decode_step_s=-1", "model.decode_step_s"),
        ("sim:parts=", "model.parts"),
        ("sim:parts=k", "model.parts"),
        ("sim:parts=k:0", "model.parts"),
        ("sim:parts=k:8/k:8", "model.parts"),
        ("sim:parts=k:8:fp 8", "model.parts"),
        ("sim:state_parts=8", "model.state_parts"),
        ("sim:index_layers=-1", "model.index_layers"),
        ("sim:order=dhn", "model.order"),
        ("sim:order=layer/part/block/head", "model.order"),
        ("sim:block_format=inside", "model.block_format"),
        ("sim:adapters=poet/poet", "model.adapters"),
        ("sim:adapters=", "model.adapters"),
        ("sim:adapters=poet:XY", "model.adapters"),
        ("sim:heads=0,order=dhn", "model.heads, model.order"),
    ],
)
def test_wrong_settings_are_named(model: str, field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_settings(model)
    assert raised.value.metadata["field"] == field
    assert raised.value.detail.startswith(field.partition(",")[0])


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens"),
        ({"kv_cache_gib": 1e-9}, "kv_cache_gib"),
        ({"max_model_len": 500, "num_gpu_blocks_override": 4}, "max_model_len"),
        (
            {"model": "sim:index_layers=1,index_block_tokens=30", "max_num_batched_tokens": 400},
            "max_num_batched_tokens",
        ),
    ],
)
def test_wrong_fields_of_the_configuration_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_shape(replace(CONFIG, **changes))
    assert raised.value.metadata["field"] == field


def test_an_unknown_engine_is_refused() -> None:
    async def descriptors(*_: object) -> None:
        return None

    with pytest.raises(ConfigError, match="unknown"):
        build_engine(replace(CONFIG, engine="tgi"), descriptors)  # type: ignore[arg-type]
