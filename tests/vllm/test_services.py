"""The services with real vLLM engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.inference.v1 import inference_pb2
from tests.suite.deployment import suite

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
async def test_remote_and_local_prefill_give_equal_tokens(tmp_path: Path) -> None:
    async with suite(tmp_path, engine="vllm", model=str(MODEL), settings=FLOAT32) as it:
        prompt = prompt_of(300, 1)
        remote = await it.generate(prompt, 8, placement=REMOTE, timeout_s=60)
        assert remote.last.usage.transferred_tokens == 299
        assert remote.last.timing.prefill_worker_id == "prefill-0"
        local = await it.generate(prompt, 8, placement=LOCAL, timeout_s=60)
        assert local.token_ids == remote.token_ids
        # Whole blocks only. vLLM's blocks on CPUs have 128 tokens.
        assert local.last.usage.decode_cached_tokens == 256
