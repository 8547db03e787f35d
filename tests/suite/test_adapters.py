"""LoRA adapters in a deployment of processes: answers are those of the adapter, whichever workers have it."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import InvalidRequest
from headrace_common.registry.adapters import Adapter
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import parse_settings
from tests.ports import free_port
from tests.suite.deployment import VOCABULARY, Suite, greedy, prompt_of, suite
from tests.waiting import until

BASE = f"sim:vocabulary={VOCABULARY}"
BOTH = f"{BASE},adapters=poet/coder"
COUNT = 6
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE


async def _ask(it: Suite, seed: int, adapter: str) -> inference_pb2.Timing:
    """The timing of a right answer."""
    prompt = prompt_of(90, seed)
    request = greedy(prompt, COUNT, REMOTE, "")
    request.adapter = adapter
    outcome = await it.ask(request)
    digest = hashlib.sha256(adapter.encode()).hexdigest()[:16]
    expected = it.model.expected_tokens(
        prompt, COUNT, adapter=Adapter(adapter, digest) if adapter else None
    )
    assert outcome.token_ids == expected
    return outcome.last.timing


async def test_answers_with_adapters_over_workers_with_different_ones(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    settings = (
        ("router", "http_listen", listen),
        ("prefill", "model", f"{BASE},adapters=poet"),
        ("decode", "model", BOTH),
    )
    sim = SimModel(parse_settings(BOTH))
    async with (
        suite(tmp_path, sim=sim, settings=settings) as it,
        openai.AsyncOpenAI(base_url=f"http://{listen}/v1", api_key="none", max_retries=0) as client,
    ):
        await it.add("decode-1", "decode-0", f"--model={BASE},adapters=poet")
        await it.wait_joined(1, 2)

        parents: dict[str, str | None] = {}

        async def listed() -> bool:
            found: list[Any] = (await client.models.list()).data
            parents.update({model.id: model.parent for model in found})
            return len(parents) == 3

        await until(listed)
        assert parents == {"sim": None, "coder": "sim", "poet": "sim"}
        # The same prompts with each adapter and without: no KV is shared between them.
        timings = await asyncio.gather(
            *(_ask(it, seed, name) for seed in range(6) for name in ("poet", "coder", ""))
        )
        for timing, name in zip(timings, 6 * ("poet", "coder", ""), strict=True):
            if name == "coder":
                assert timing.decode_worker_id == "decode-0"
                # No prefill worker has it.
                assert timing.prefill_worker_id == ""
        again = [await _ask(it, seed, name) for seed in range(2) for name in ("poet", "coder", "")]
        assert {timing.decode_worker_id for timing in again[1::3]} == {"decode-0"}
        answer = await client.completions.create(model="poet", prompt="hello", max_tokens=4)
        assert answer.model == "poet"
        with pytest.raises(openai.NotFoundError, match="painter"):
            await client.completions.create(model="painter", prompt="hello", max_tokens=4)
        with pytest.raises(InvalidRequest, match="no live worker of sim has adapter 'painter'"):
            await _ask(it, 0, "painter")
