"""Decode begins before the last layers are there: the same tokens, and nobody else's trouble when they do not come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_engine.vllm.link.messages import EngineLoad
from tests.vllm.conftest import RunJob
from tests.vllm.layer_wise import LATE, LENGTHS

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        not Path("models/tiny-llama").is_dir(), reason="the models are not there: make setup"
    ),
]

BLOCK_COUNT = 128


def assert_equal(result: dict[str, Any]) -> None:
    assert result["plain"].keys() == {str(length) for length in LENGTHS}
    assert result["split"] == result["plain"]
    assert result["after_first"] == result["plain"]
    # Twice each: or there would be nothing to see here.
    assert result["early_starts"] == 2 * len(LENGTHS)


def assert_failed_alone(went: dict[str, Any]) -> None:
    assert went["tokens"] == []
    assert went["bystander_right"]
    # Neither the prefix cache nor the next attempt knows of it.
    assert went["cached_after"] == 0
    assert went["after"] == went["again"] == went["plain"]
    assert EngineLoad(**went["load"]) == EngineLoad(0, 0, 0, BLOCK_COUNT - 1)


def test_what_begins_early_and_what_fails_late(run_job: RunJob) -> None:
    result = run_job("tests.vllm.layer_wise:story", model="models/tiny-llama")
    assert_equal(result)
    for name in ("given_up", "aborted", "cut_off"):
        assert_failed_alone(result[name])
    for name in ("given_up", "aborted"):
        # Prefill may write into its blocks yet.
        assert not result[name]["released_before_end"]
        assert result[name]["held_blocks_at_end"] >= 7
    assert result["given_up"]["error"] == "TransferFailed"
    assert result["given_up"]["bystander_gap_s"] >= LATE.wait_s
    assert result["cut_off"]["error"] == "TransferFailed"
    # Neither waits for the step's patience to end.
    for name in ("aborted", "cut_off"):
        assert result[name]["bystander_gap_s"] < LATE.wait_s
    shared = result["shared"]
    assert shared["error"] == "TransferFailed"
    assert shared["answer"] == shared["plain"]


@pytest.mark.long
@pytest.mark.parametrize(
    "model, prefill_ranks, decode_ranks",
    [("tiny-llama", 1, 2), ("tiny-llama", 2, 1), ("tiny-deepseek-v3", 1, 1)],
)
def test_other_layouts_begin_early_too(
    run_job: RunJob, model: str, prefill_ranks: int, decode_ranks: int
) -> None:
    if not Path("models", model).is_dir():
        pytest.skip(f"{model} is not there: make setup")
    result = run_job(
        "tests.vllm.layer_wise:answers",
        model=f"models/{model}",
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
    )
    assert_equal(result)
