"""Whole deployments: workers with different cache layouts, and models with more than keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import parse_settings
from tests.suite.deployment import VOCABULARY, prompt_of, suite

MODEL = f"sim:layers=2,heads=6,parts=k:16:int8/scale:4:float32,vocabulary={VOCABULARY}"


@pytest.mark.parametrize(
    "caches, prefill, decode",
    [
        ("", "order=nhd", "order=block/layer/part/head/token,stages=2"),
        (",index_layers=2,state_layers=2", "stages=3", "index_block_tokens=16,order=nhd"),
    ],
    ids=["scales", "index-and-state"],
)
async def test_workers_with_different_cache_layouts(
    tmp_path: Path, caches: str, prefill: str, decode: str
) -> None:
    model = MODEL + caches
    settings = (
        ("prefill", "model", f"{model},{prefill}"),
        ("decode", "model", f"{model},{decode}"),
        ("prefill", "tensor_parallel_size", "3"),
        ("decode", "tensor_parallel_size", "2"),
        ("decode", "block_size", "8"),
    )
    async with suite(tmp_path, sim=SimModel(parse_settings(model)), settings=settings) as it:
        for number in range(3):
            prompt = [*prompt_of(40, 1), *prompt_of(30, number)]
            outcome = await it.generate(prompt, 12)
            assert outcome.token_ids == it.expected(prompt, 12)
