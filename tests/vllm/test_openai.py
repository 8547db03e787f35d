"""The OpenAI HTTP API with a real model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.inference.v1 import inference_pb2, sampling_pb2
from tests.ports import free_port
from tests.suite.deployment import suite
from tests.vllm.conftest import RunJob

MODEL = "SmolLM2-135M-Instruct"
PROMPTS = (
    "What is the capital of France?",
    "Name three colours, in one line. Ünïcödé: 你好.",
    "Write one sentence about rivers.",
)
TOKENS = 24
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("ignore"),
]


def test_text_over_http_equals_that_of_grpc_and_of_vllm_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_job: RunJob
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    plain = run_job("tests.vllm.plain:chat_texts", model=MODEL, prompts=PROMPTS, max_tokens=TOKENS)
    served = asyncio.run(texts_of_both(tmp_path))
    assert served == [(text, text, text) for text in plain["texts"]]
    assert "Paris" in plain["texts"][0]


async def texts_of_both(folder: Path) -> list[tuple[str, str, str]]:
    """The text over HTTP, streamed over HTTP, and over gRPC, for each prompt."""
    listen = f"127.0.0.1:{free_port()}"
    settings = (
        ("router", "http_listen", listen),
        *((role, name, value) for role in ("prefill", "decode") for name, value in WORKER),
    )
    found: list[tuple[str, str, str]] = []
    async with (
        suite(folder, engine="vllm", model=f"models/{MODEL}", settings=settings) as it,
        openai.AsyncOpenAI(base_url=f"http://{listen}/v1", api_key="none", timeout=60) as client,
    ):
        for prompt in PROMPTS:
            fields: dict[str, Any] = {
                "model": MODEL,
                "messages": [{"role": "user", "content": prompt}],
                "max_completion_tokens": TOKENS,
                "temperature": 0,
            }
            whole = await client.chat.completions.create(**fields)
            parts = [
                chunk.choices[0].delta.content or ""
                async for chunk in await client.chat.completions.create(**fields, stream=True)
            ]
            messages = [inference_pb2.ChatMessage(role="user", content=prompt)]
            sampling = sampling_pb2.SamplingParams(max_tokens=TOKENS, temperature=0)
            request = inference_pb2.GenerateRequest(
                chat=inference_pb2.Chat(messages=messages), sampling=sampling
            )
            over_grpc = (await it.ask(request, 60)).text
            found.append((whole.choices[0].message.content or "", "".join(parts), over_grpc))
    return found


WORKER = (("dtype", "float32"), ("max_model_len", "512"))
