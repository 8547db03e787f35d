"""Decode overlaps the last layers: the same tokens, and no effect on others when they do not arrive."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_engine.vllm.link.messages import EngineLoad
from tests.vllm.conftest import RunJob
from tests.vllm.layer_wise import LENGTHS, OVERLAP

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

BLOCK_COUNT = 128


def assert_equal(result: dict[str, Any]) -> None:
    assert result["plain"].keys() == {str(length) for length in LENGTHS}
    assert result["split"] == result["plain"]
    assert result["after_first"] == result["plain"]
    # All requests were overlapped, two for each length.
    assert result["overlap_count"] == 2 * len(LENGTHS)


def assert_failed_alone(outcome: dict[str, Any]) -> None:
    assert outcome["tokens"] == []
    assert outcome["bystander_right"]
    # It leaves nothing in the prefix cache, and the next attempt succeeds.
    assert outcome["cached_after"] == 0
    assert outcome["after"] == outcome["again"] == outcome["plain"]
    assert EngineLoad(**outcome["load"]) == EngineLoad(0, 0, 0, BLOCK_COUNT - 1)


def test_overlapped_requests_give_equal_tokens_and_fail_alone(run_job: RunJob) -> None:
    result = run_job("tests.vllm.layer_wise:compare_and_end_early", model="tiny-llama")
    assert_equal(result)
    for name in ("wait_expired", "aborted", "cut_off"):
        assert_failed_alone(result[name])
    for name in ("wait_expired", "aborted"):
        # Prefill may still write into its blocks.
        assert not result[name]["released_before_end"]
        assert result[name]["held_blocks_at_end"] >= 7
    assert result["wait_expired"]["error"] == "TransferFailed"
    assert result["wait_expired"]["bystander_gap_s"] >= OVERLAP.wait_s
    assert result["cut_off"]["error"] == "TransferFailed"
    # Both end before the step's wait expires.
    for name in ("aborted", "cut_off"):
        assert result[name]["bystander_gap_s"] < OVERLAP.wait_s
    shared = result["shared"]
    assert shared["error"] == "TransferFailed"
    assert shared["answer"] == shared["plain"]


@pytest.mark.parametrize(
    "model, prefill_ranks, decode_ranks",
    [("tiny-llama", 1, 2), ("tiny-llama", 2, 1), ("tiny-deepseek-v3", 1, 1)],
)
def test_other_layouts_are_overlapped_too(
    run_job: RunJob, model: str, prefill_ranks: int, decode_ranks: int
) -> None:
    result = run_job(
        "tests.vllm.layer_wise:answers",
        model=model,
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
    )
    assert_equal(result)
