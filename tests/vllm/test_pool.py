"""KV that one worker has computed is loaded by another one from a remote pool, and not computed again."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import RunJob
from tests.vllm.pool import PROMPT_COUNT, PROMPT_TOKENS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]


@pytest.mark.parametrize(
    ("model", "tensor_parallel_size"), [("tiny-llama-deep", 1), ("tiny-llama", 2)]
)
def test_another_worker_loads_prompts_from_the_pool_with_equal_answers(
    run_job: RunJob, model: str, tensor_parallel_size: int
) -> None:
    found = run_job(
        "tests.vllm.pool:shared", model=model, tensor_parallel_size=tensor_parallel_size
    )
    assert found["pooled"] == found["handed"] == found["without"]
    assert found["cached"] == [PROMPT_TOKENS - 1] * PROMPT_COUNT
    assert found["cached_without"] == [0] * PROMPT_COUNT
