"""Data-parallel ranks on two GPUs: two decode workers answer as vLLM alone does on one."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tests.devices import CUDA
from tests.gpu.test_pair import require_engines
from tests.suite.deployment import greedy, prompt_of, suite
from tests.vllm.data_parallel import as_ranks
from tests.vllm.jobs import run_job

MODEL = Path("models/tiny-gpt-oss")
DEVICES = ("0", "1")
TOKENS = 12
BLOCK_TOKENS = 32
ANSWERED_S = 120.0
PROMPTS = [prompt_of(60 + 40 * number, number) for number in range(6)]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("engine_args", ["", "--enable-expert-parallel"])
async def test_ranks_answer_as_vllm_alone(tmp_path: Path, engine_args: str) -> None:
    require_engines(CUDA, MODEL)
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < len(DEVICES):
        pytest.skip(f"ranks need {len(DEVICES)} CUDA devices")
    await answer_as_vllm_alone(tmp_path, engine_args, DEVICES)


async def answer_as_vllm_alone(folder: Path, engine_args: str, devices: tuple[str, ...]) -> None:
    """Each prompt while the other rank is idle, and then all together."""
    job = partial(
        run_job,
        "tests.vllm.plain:greedy_tokens",
        model=str(MODEL),
        prompts=PROMPTS,
        max_tokens=[TOKENS] * len(PROMPTS),
        engine={"block_size": BLOCK_TOKENS, "max_model_len": 1024},
    )
    expected = (await asyncio.to_thread(job))["tokens"]
    requests = [greedy(prompt, TOKENS) for prompt in PROMPTS]
    async with suite(
        folder,
        engine="vllm",
        model=str(MODEL),
        prefill_count=0,
        decode_count=2,
        settings=(
            ("decode", "dtype", "float32"),
            ("decode", "kv_cache_gib", "1"),
            ("decode", "block_size", str(BLOCK_TOKENS)),
        ),
        spawning=partial(
            as_ranks, more={"decode": f"--enforce-eager {engine_args}"}, devices=devices
        ),
    ) as it:
        alone = [await it.ask(one, ANSWERED_S) for one in requests]
        together = await asyncio.gather(*(it.ask(one, ANSWERED_S) for one in requests))
    for outcomes in (alone, together):
        assert [list(outcome.token_ids) for outcome in outcomes] == expected
    assert {one.last.timing.decode_worker_id for one in together} == {"decode-0", "decode-1"}
