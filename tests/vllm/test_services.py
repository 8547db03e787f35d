"""The services with real vLLM engines, as a user runs them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from headrace.inference.v1 import inference_pb2
from tests.suite.deployment import Suite, suite

MODEL = Path("models/tiny-llama")
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
FLOAT32 = (("prefill", "dtype", "float32"), ("decode", "dtype", "float32"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not MODEL.is_dir(), reason="the model is not there: make setup"),
]


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def prompt_of(length: int, seed: int) -> list[int]:
    return [(7 * seed + 13 * index) % 400 + 8 for index in range(length)]


@pytest.mark.timeout(240)
async def test_a_killed_prefill_worker_with_a_request_in_flight_costs_no_answer(
    tmp_path: Path,
) -> None:
    async with suite(tmp_path, engine="vllm", model=str(MODEL), settings=FLOAT32) as it:
        prompt = prompt_of(300, 1)
        first = await it.generate(prompt, 8, placement=REMOTE, timeout_s=60)
        assert first.last.usage.transferred_tokens == 299
        assert first.last.timing.prefill_worker_id == "prefill-0"
        again = await it.generate(prompt, 8, placement=LOCAL, timeout_s=60)
        assert again.token_ids == first.token_ids
        # Whole blocks only, and those of vLLM on processors have 128 tokens.
        assert again.last.usage.decode_cached_tokens == 256

        prompt = prompt_of(500, 2)
        running = asyncio.create_task(it.generate(prompt, 8, placement=REMOTE, timeout_s=60))
        await frozen_with_a_task(it)
        it.kill("prefill-0")
        after = await running
        assert after.last.timing.prefill_worker_id == ""
        assert after.last.timing.attempts > 1
        again = await it.generate(prompt, 8, placement=LOCAL, timeout_s=60)
        assert again.token_ids == after.token_ids
        await it.wait_empty("decode-0", timeout_s=40)


async def frozen_with_a_task(it: Suite) -> None:
    """Stands prefill still before it can answer, so that the kill meets a request in flight."""
    os.kill(it.child("prefill-0").process.pid, signal.SIGSTOP)
    for _ in range(100):
        if (await it.status("decode-0")).active_transfers:
            return
        await asyncio.sleep(0.05)
    pytest.fail("the request never reached decode")
