"""Two engines answer to prompts with images as vLLM alone does. Decode encodes none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.devices import CPU, shared
from tests.fork_server import TORCHVISION, TORCHVISION_PATH
from tests.kit.examples import run_example
from tests.ports import free_port
from tests.suite.deployment import suite
from tests.vllm.conftest import RunJob

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        bool(TORCHVISION_PATH) and not TORCHVISION.is_dir(),
        reason="torchvision is missing: make test-vllm fetches it",
    ),
]


@pytest.mark.core
def test_images_are_handed_over_and_encoded_by_prefill_only(run_job: RunJob) -> None:
    """With cold caches, all at once, and with what a conversation has left. One of the engines is the reference."""
    parts = ["cold", "together", "next_turn"]
    found = run_job("tests.vllm.images:compare", model="tiny-llava", parts=parts)
    for kind in ("greedy", "sampled"):
        for way, answers in found[kind].items():
            for name, tokens in answers.items():
                assert tokens == found[kind]["local"][name], f"{kind}, {way}: {name}"
    assert found["encoded_for_handovers"] == 0
    assert found["encoded_for_local"] > 10


@pytest.mark.parametrize("model", ["tiny-qwen2-vl", "tiny-llava"])
def test_two_engines_answer_to_images_as_one(run_job: RunJob, model: str) -> None:
    """With cold and warm caches, after a killed prefill, and continued. The first token is also sampled."""
    expected = run_job("tests.vllm.images:alone", model=model)
    found = run_job("tests.vllm.images:compare", model=model)
    assert len(found["greedy"]) == 9
    assert len(found["compared"]) > 4
    assert set(found["compared"].values()) == {"same, None"}
    for kind in ("greedy", "sampled"):
        for way, answers in found[kind].items():
            for name, tokens in answers.items():
                assert tokens == expected[kind][name], f"{kind}, {way}: {name}"
    assert found["encoded_for_handovers"] == 0
    assert found["encoded_for_local"] > 10


def test_prefill_fetches_what_decode_has_of_a_conversation_about_images(run_job: RunJob) -> None:
    found = run_job("tests.vllm.image_fetch:converse", model="tiny-qwen2-vl")
    assert found["answers"] == found["plain"]
    assert found["reasons"] == [""] * 3
    assert all(tokens > 64 for tokens in found["fetched_tokens"])
    assert found["encoded"] == [0]


@pytest.mark.filterwarnings("ignore")
async def test_the_example_has_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(TORCHVISION_PATH))
    listen = f"127.0.0.1:{free_port()}"
    settings = shared(CPU, dtype="float32", max_model_len=2_048, engine_args="--enforce-eager")
    settings = (("router", "http_listen", listen), *settings)
    async with suite(tmp_path, engine="vllm", model="models/tiny-llava", settings=settings):
        assert (await run_example("images.py", listen)).startswith("answers ")
