"""Whole deployments: prefill writes to one decode rank of a group, which copies to the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_common.telemetry import schema
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import parse_settings
from tests.suite.deployment import VOCABULARY, prompt_of, suite

LAYERS, RANKS = 3, 4
MODEL = f"sim:layers={LAYERS},heads=1,vocabulary={VOCABULARY}"


@pytest.mark.parametrize("setting, crossing", [("true", 1), ("false", RANKS)])
async def test_mla_reaches_four_ranks(tmp_path: Path, setting: str, crossing: int) -> None:
    settings = (
        ("prefill", "model", MODEL),
        ("decode", "model", MODEL),
        ("prefill", "tensor_parallel_size", "2"),
        ("decode", "tensor_parallel_size", str(RANKS)),
        ("decode", "local_broadcast", setting),
    )
    async with suite(tmp_path, sim=SimModel(parse_settings(MODEL)), settings=settings) as it:
        prompt = prompt_of(50, 1)
        outcome = await it.generate(prompt, 6)
        assert outcome.token_ids == it.expected(prompt, 6)
        trace = await it.trace(outcome.trace_id)
        (wait,) = (span for span in trace.spans if span.name == schema.SPAN_DECODE_KV_WAIT)
        cache_bytes = 49 * LAYERS * 16
        assert int(wait.attributes[schema.ATTRIBUTE_PAYLOAD_BYTES]) == crossing * cache_bytes
        local_bytes = int(wait.attributes[schema.ATTRIBUTE_LOCAL_BYTES])
        assert local_bytes == (RANKS - crossing) * cache_bytes
