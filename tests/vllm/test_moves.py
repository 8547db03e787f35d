"""Running answers of real engines move between decode workers. Each equals that of an undisturbed run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2
from headrace_cli.commands.workers import move_answer
from tests.suite.deployment import greedy, suite
from tests.vllm.conftest import on_services
from tests.vllm.test_services import LOCAL, SEEDED, assert_same, prompt_of

TOKENS = 1_700
PROMPT_TOKENS = 150
pytestmark = on_services(Path("models/tiny-gemma3"))


@pytest.mark.parametrize(
    ("model", "engine_args"),
    [
        pytest.param("tiny-llama", "", id="plain"),
        pytest.param("tiny-llama", "--async-scheduling", id="steps ahead"),
        pytest.param("tiny-gemma3", "", id="windows"),
    ],
)
async def test_answers_move_there_and_back(tmp_path: Path, model: str, engine_args: str) -> None:
    settings = (
        ("decode", "dtype", "float32"),
        ("decode", "engine_args", f"--enforce-eager {engine_args}"),
    )
    requests = [
        greedy(prompt_of(PROMPT_TOKENS + n, n), TOKENS, LOCAL, f"r{n}", logprobs=1, **params)
        for n, params in enumerate(({}, SEEDED))
    ]
    topology: dict[str, Any] = {"engine": "vllm", "model": f"models/{model}", "settings": settings}
    async with suite(tmp_path, **topology, prefill_count=0, decode_count=2) as it:
        undisturbed = [await it.ask(request, 90) for request in requests]
        running = await it.begun(requests, timeout_s=90, started_tokens=8)
        moves: list[inference_pb2.AnswerMove] = []
        for _ in range(2):
            moving = (move_answer(it.deployment.registry, one.request_id, "") for one in requests)
            for moved in await asyncio.gather(*moving):
                moves += moved.moves
        disturbed = await asyncio.gather(*running)
        for result, plain in zip(disturbed, undisturbed, strict=True):
            assert_same(result, plain)
            assert result.last.timing.attempts == 1
        assert {move.source_worker_id for move in moves} == {"decode-0", "decode-1"}
        assert any(move.payload_bytes for move in moves)
        for name in ("decode-0", "decode-1"):
            await it.wait_empty(name, timeout_s=20)
