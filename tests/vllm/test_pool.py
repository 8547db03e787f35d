"""KV that a prefill worker has computed comes from a remote pool to workers of the same layout."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import RunJob
from tests.vllm.pool import PROMPT_COUNT, PROMPT_TOKENS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

WHOLE = PROMPT_TOKENS - 1


@pytest.mark.parametrize(
    ("model", "size", "block_bytes", "stages"),
    [
        ("tiny-llama-deep", 1, 393_216, 1),
        ("tiny-llama", 2, 131_072, 1),
        ("tiny-llama", 1, 131_072, 2),
    ],
)
def test_evicted_prompts_return_from_the_pool_and_a_killed_store_costs_no_answer(
    run_job: RunJob, model: str, size: int, block_bytes: int, stages: int
) -> None:
    found = run_job(
        "tests.vllm.pool:shared",
        model=model,
        size=size,
        block_bytes=block_bytes,
        stages=stages,
    )
    assert found["again"] == found["without"] == found["first"]
    assert found["cached"] == [WHOLE] * PROMPT_COUNT
    assert found["foreign_cached"] == 0
    assert (found["turn_received"], found["turn_prefill_cached"]) == (WHOLE, WHOLE)
    handed, alone = found["turn"]
    assert handed == alone
    # Decode has no room for all prompts, so all of their KV came from the pool before.
    assert max(found["cached_without"]) < WHOLE / 2
