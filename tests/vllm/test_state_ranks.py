"""States move between engines with different numbers of ranks: each rank gets its heads."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import RunJob
from tests.vllm.state_ranks import LENGTHS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("model", "prefill_ranks", "decode_ranks", "heads"),
    [
        ("tiny-lfm2", 2, 1, [64, 64]),
        pytest.param("tiny-lfm2", 1, 2, [64, 64], marks=pytest.mark.long),
    ],
)
def test_tokens_equal_plain_vllm_whatever_the_ranks(
    run_job: RunJob, model: str, prefill_ranks: int, decode_ranks: int, heads: list[int]
) -> None:
    result = run_job(
        "tests.vllm.state_ranks:measure",
        model=model,
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
        dtype="float32",
        max_tokens=8,
    )
    assert result["heads"] == heads
    assert len({tuple(token_ids) for token_ids in result["plain"]}) == len(LENGTHS)
    assert result["split"] == result["together"] == result["plain"]
    assert max(result["differences"]) < 1e-4
    assert all(size > 0 for size in result["received"])
