"""States move between engines with different numbers of ranks: each rank gets its heads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import RunJob
from tests.vllm.state_ranks import LENGTHS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

# In bfloat16, ranks round differently. Heads in the wrong places make differences of more than 1.
ROUNDING_MAX = 0.3


@pytest.mark.parametrize(
    ("model", "prefill_ranks", "decode_ranks", "heads"),
    [
        ("tiny-lfm2", 2, 1, [64, 64]),
        ("tiny-lfm2", 1, 2, [64, 64]),
        # Heads, and groups of heads. Of a single group, every rank has a copy.
        ("tiny-mamba2", 2, 1, [8, 1]),
        ("tiny-mamba2", 1, 2, [8, 1]),
        ("tiny-mamba2-groups", 2, 1, [8, 2]),
        ("tiny-mamba2-groups", 1, 2, [8, 2]),
    ],
)
def test_tokens_equal_plain_vllm_whatever_the_ranks(
    run_job: RunJob, model: str, prefill_ranks: int, decode_ranks: int, heads: list[int]
) -> None:
    result = measured(run_job, model, prefill_ranks, decode_ranks, "float32", heads)
    plain = [one["plain"] for one in result["prompts"]]
    assert [one["split"] for one in result["prompts"]] == result["together"] == plain
    assert max(max(one["differences"]) for one in result["prompts"]) < 1e-4


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 1), (1, 2)])
def test_delta_nets_differ_by_rounding_only(
    run_job: RunJob, prefill_ranks: int, decode_ranks: int
) -> None:
    # 2 heads of keys, with 2 values each.
    result = measured(
        run_job, "tiny-qwen3-next", prefill_ranks, decode_ranks, "bfloat16", [2, 2, 2]
    )
    for one in result["prompts"]:
        for place, lead in enumerate(one["leads"]):
            assert one["differences"][place] < ROUNDING_MAX
            if one["split"][place] != one["plain"][place]:
                # The next token was almost as probable. What follows cannot be compared.
                assert lead < ROUNDING_MAX
                break


def measured(
    run_job: RunJob,
    model: str,
    prefill_ranks: int,
    decode_ranks: int,
    dtype: str,
    heads: list[int],
) -> dict[str, Any]:
    result = run_job(
        "tests.vllm.state_ranks:measure",
        model=model,
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
        dtype=dtype,
    )
    assert result["heads"] == heads
    assert len({tuple(one["plain"]) for one in result["prompts"]}) == len(LENGTHS)
    assert all(size > 0 for size in result["received"])
    return result
