"""SmolLM2 on two engines answers as on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.conftest import RunJob
from tests.vllm.real_weights import LENGTHS

MODEL = "models/SmolLM2-135M-Instruct"

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path(MODEL).is_dir(), reason="the model is not there: make model"),
]


def test_two_engines_answer_as_one(run_job: RunJob) -> None:
    result = run_job("tests.vllm.real_weights:compare", model=MODEL)
    assert len(result["plain"]) == len(LENGTHS)
    assert result["split"] == result["after_first"] == result["from_logits"] == result["plain"]
