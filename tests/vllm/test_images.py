"""Two engines answer to prompts with images as vLLM alone does. Decode encodes none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.jobs import LOG_CHARACTERS_MAX

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

# For processors, the package index may have none that torch accepts.
TORCHVISION = Path("build/torchvision").resolve()
JOB_TIMEOUT_S = 400.0


def run(job: str, model: str, folder: Path, module: str = "images") -> dict[str, Any]:
    """As jobs.run_job does, in a new process: the fork server may have imported vLLM without torchvision."""
    if not Path("models", model).is_dir():
        pytest.skip(f"the model folder models/{model} is missing: make test-vllm makes it")
    paths = [os.environ.get("PYTHONPATH", "")]
    if find_spec("torchvision") is None:
        if not TORCHVISION.is_dir():
            pytest.skip("torchvision is missing: make test-vllm fetches it")
        paths.insert(0, str(TORCHVISION))
    result = folder / "result.json"
    arguments = json.dumps({"model": f"models/{model}"})
    job_name = f"tests.vllm.{module}:{job}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.jobs", job_name, arguments, str(result)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=JOB_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{job}: {done.stdout[-LOG_CHARACTERS_MAX:]}"
    values: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return values


@pytest.mark.parametrize(
    "model", ["tiny-qwen2-vl", pytest.param("tiny-llava", marks=pytest.mark.core)]
)
def test_two_engines_answer_to_images_as_one(tmp_path: Path, model: str) -> None:
    """With cold and warm caches, after a killed prefill, and continued. The first token is also sampled."""
    expected = run("alone", model, tmp_path)
    found = run("compare", model, tmp_path)
    assert len(found["greedy"]) == 9
    for kind in ("greedy", "sampled"):
        for way, answers in found[kind].items():
            for name, tokens in answers.items():
                assert tokens == expected[kind][name], f"{kind}, {way}: {name}"
    assert found["encoded_for_handovers"] == 0
    assert found["encoded_for_local"] > 10


def test_prefill_fetches_what_decode_has_of_a_conversation_about_images(tmp_path: Path) -> None:
    found = run("converse", "tiny-qwen2-vl", tmp_path, "image_fetch")
    assert found["answers"] == found["plain"]
    assert found["reasons"] == [""] * 3
    assert all(tokens > 64 for tokens in found["fetched_tokens"])
    assert found["encoded"] == [0]
