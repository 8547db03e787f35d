"""Two engines answer as one, for latent attention, windows, short convolutions, gated delta nets and states."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import RunJob

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("model", "variant"),
    [
        ("tiny-deepseek-v2", ""),
        ("tiny-gemma3", ""),
        pytest.param("tiny-lfm2", "", marks=pytest.mark.core),
        ("tiny-mamba2", ""),
        ("tiny-deepseek-v3", ""),
        ("tiny-gpt-oss", ""),
        ("tiny-llama4", ""),
        ("tiny-qwen3-next", ""),
        ("tiny-llama", "fp8"),
    ],
)
def test_two_engines_answer_as_one(run_job: RunJob, model: str, variant: str) -> None:
    check(run_job, model, variant)


def check(run_job: RunJob, model: str, variant: str = "", **stages: int) -> None:
    result = run_job("tests.vllm.hybrids:compare", model=model, variant=variant, **stages)
    print(f"{model}: engines up in {result['start_s']:.1f} s, done after {result['total_s']:.1f} s")
    assert len(result["differences"]) > 15
