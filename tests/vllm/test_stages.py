"""Prefill and decode with pipeline stages, compared with vLLM alone."""

from __future__ import annotations

from bisect import bisect_right

import pytest

from tests.vllm.conftest import RunJob
from tests.vllm.tensor_parallel import CellResult
from tests.vllm.test_hybrids import check as check_hybrid
from tests.vllm.test_tensor_parallel import (
    GROUPED,
    LATENT,
    LATENT_WIDE,
    MANY,
    SINGLE,
    check,
    result_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

# (model, prefill's stages and ranks of each, decode's, writes per layer)
SHAPES = [
    (GROUPED, (2, 1), (1, 1), 1),
    (LATENT, (2, 1), (1, 1), 1),
    (GROUPED, (2, 1), (1, 2), 2),
    (GROUPED, (1, 1), (2, 1), 1),
    (GROUPED, (1, 2), (2, 1), 2),
    (GROUPED, (2, 1), (2, 1), 1),
    (GROUPED, (2, 2), (1, 1), 2),
    # Stages of one, one and two layers to stages of two.
    (MANY, (3, 1), (2, 1), 1),
    # The ranks of each stage of decode copy the one head to each other.
    (SINGLE, (1, 1), (2, 2), 1),
    (LATENT, (1, 1), (2, 1), 1),
    (LATENT_WIDE, (2, 1), (1, 2), 1),
]


@pytest.mark.parametrize(("model", "prefill", "decode", "writes"), SHAPES)
def test_tokens_equal_plain_vllm_and_each_rank_sends_its_own_layers(
    run_job: RunJob, model: str, prefill: tuple[int, int], decode: tuple[int, int], writes: int
) -> None:
    (prefill_stages, prefill_ranks), (decode_stages, decode_ranks) = prefill, decode
    result = result_of(
        run_job,
        model,
        prefill_ranks,
        decode_ranks,
        prefill_stages=prefill_stages,
        decode_stages=decode_stages,
    )
    assert len(result.prefill_starts) == prefill_stages
    assert len(result.decode_starts) == decode_stages
    check(result, model, prefill_ranks, decode_ranks, writes)
    check_stages(result, prefill_ranks, decode_ranks)


@pytest.mark.parametrize(("prefill_stages", "decode_stages"), [(2, 1), (1, 2)])
@pytest.mark.parametrize(
    ("model", "variant"),
    [
        ("tiny-gemma3", ""),
        ("tiny-gpt-oss", ""),
        ("tiny-llama4", ""),
        ("tiny-lfm2", ""),
        ("tiny-qwen3-next-deep", "tiny-qwen3-next"),
    ],
)
def test_windows_and_states_move_between_different_stages(
    run_job: RunJob, model: str, variant: str, prefill_stages: int, decode_stages: int
) -> None:
    check_hybrid(
        run_job, model, variant, prefill_stages=prefill_stages, decode_stages=decode_stages
    )


def check_stages(result: CellResult, prefill_ranks: int, decode_ranks: int) -> None:
    """Each layer goes from a rank of the stage that has it to one of decode's stage that has it."""
    for answer in (*result.split, *result.together):
        for source, destination, layer, _ in answer.sent:
            assert source // prefill_ranks == bisect_right(result.prefill_starts, layer) - 1
            assert destination // decode_ranks == bisect_right(result.decode_starts, layer) - 1
