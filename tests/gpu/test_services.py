"""Whole services with a prefill and a decode worker on one device: the demo, OpenAI's HTTP, tiers, steps ahead, graphs.

On processors there are no graphs. The rest is the same.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_cli.client import reset_prefix_cache
from tests.devices import CPU, DEVICES, shared
from tests.forked_command import run_forked
from tests.gpu.pair import Tokens
from tests.gpu.test_pair import differ, require_engines
from tests.ports import free_port
from tests.suite.deployment import Outcome, Suite, greedy, suite
from tests.vllm.pair import BLOCK_TOKENS, STEPS_AHEAD, prompt_of
from tests.vllm.tiers import KV_MEMORY_BLOCKS, PROMPT_COUNT, PROMPT_TOKENS

MODEL = Path("models/tiny-llama")
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
TOKENS = 16
STREAMS = 8
# On a device, workers compile and capture graphs first.
START_S = 300.0

pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("ignore"),
]


def settings_of(device: str) -> tuple[tuple[str, str, str], ...]:
    """Workers that plan steps ahead, use graphs where there are any, and evict prompts to main memory."""
    return shared(
        device,
        dtype="float32" if device == CPU else "bfloat16",
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=KV_MEMORY_BLOCKS,
        max_model_len=512,
        kv_host_gib=0.25,
        # On a device, both are vLLM's defaults.
        **({"engine_args": STEPS_AHEAD} if device == CPU else {}),
    )


@pytest.mark.parametrize("device", DEVICES)
async def test_the_demo_answers(device: str, tmp_path: Path) -> None:
    require_engines(device, MODEL)
    given = [f"--set={role}.{name}={value}" for role, name, value in shared(device)]
    shown = await run_forked(
        "headrace_cli",
        *("demo", "--model", str(MODEL), "--logs", str(tmp_path), "--max-tokens", "6", *given),
        timeout_s=START_S,
    )
    assert shown.status == 0, shown.err
    assert "time to first token" in shown.out
    assert "on 1 link" in shown.out


@pytest.mark.parametrize("device", DEVICES)
async def test_services_answer_the_same_by_every_way(device: str, tmp_path: Path) -> None:
    require_engines(device, MODEL)
    listen = f"127.0.0.1:{free_port()}"
    # Both ranks of a hand-over compute digests in their own memory.
    digests = ("decode", "digest", "on")
    settings = (("router", "http_listen", listen), digests, *settings_of(device))
    async with (
        suite(tmp_path, engine="vllm", model=str(MODEL), settings=settings) as it,
        openai.AsyncOpenAI(base_url=f"http://{listen}/v1", api_key="none", timeout=60) as client,
    ):
        await check_texts(it, client)
        prompts = [prompt_of(PROMPT_TOKENS, seed) for seed in range(PROMPT_COUNT)]
        plain = [await ask(it, prompt, LOCAL) for prompt in prompts]
        for prompt, one in zip(prompts, plain, strict=True):
            # It has left KV memory, where two prompts have room, and returns from main memory.
            again = await ask(it, prompt, LOCAL)
            assert again.last.usage.decode_cached_tokens == PROMPT_TOKENS - 1
            assert not differ(tokens_of(one), tokens_of(again))
        await check_streams(it)
        for name in ("prefill-0", "decode-0"):
            await it.wait_empty(name, timeout_s=30)


async def check_texts(it: Suite, client: openai.AsyncOpenAI) -> None:
    """The text of a chat over HTTP, streamed over HTTP, and over gRPC. Each time the prompt is handed over."""
    text = "Name three colours: Ünïcödé, 你好."
    fields: dict[str, Any] = {
        "model": MODEL.name,
        "messages": [{"role": "user", "content": text}],
        "max_completion_tokens": TOKENS,
        "temperature": 0,
    }
    whole = await client.chat.completions.create(**fields)
    await forget(it)
    parts = [
        chunk.choices[0].delta.content or ""
        async for chunk in await client.chat.completions.create(**fields, stream=True)
    ]
    await forget(it)
    messages = [inference_pb2.ChatMessage(role="user", content=text)]
    request = inference_pb2.GenerateRequest(
        chat=inference_pb2.Chat(messages=messages),
        sampling=sampling_pb2.SamplingParams(max_tokens=TOKENS, temperature=0),
        prefill_placement=REMOTE,
    )
    over_grpc = await it.ask(request, 60)
    assert over_grpc.last.usage.transferred_tokens > 0
    assert over_grpc.text
    assert whole.choices[0].message.content == "".join(parts) == over_grpc.text


async def check_streams(it: Suite) -> None:
    """Streams with prompts that are handed over have the tokens of prompts that decode computes."""
    prompts = [prompt_of(40, 100 + seed) for seed in range(STREAMS)]
    alone = [await ask(it, prompt, LOCAL) for prompt in prompts]
    await forget(it)
    split = await asyncio.gather(*(ask(it, prompt, REMOTE) for prompt in prompts))
    for one, other in zip(alone, split, strict=True):
        assert other.last.timing.prefill_worker_id == "prefill-0"
        assert other.last.usage.transferred_tokens > 0
        assert not differ(tokens_of(one), tokens_of(other))


async def forget(it: Suite) -> None:
    """Empties the prefix caches."""
    for name in ("prefill-0", "decode-0"):
        await it.wait_empty(name, timeout_s=30)
        await reset_prefix_cache(it.child(name).endpoint, 10.0)


async def ask(
    it: Suite, prompt: list[int], placement: inference_pb2.PrefillPlacement.ValueType
) -> Outcome:
    return await it.ask(greedy(prompt, TOKENS, placement, logprobs=5), 90)


def tokens_of(outcome: Outcome) -> Tokens:
    return Tokens(
        list(outcome.token_ids),
        [[(one.token_id, one.logprob) for one in entry.alternatives] for entry in outcome.logprobs],
    )
