"""KV that has left vLLM's KV memory returns from main memory or disk, and is not computed again."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import RunJob
from tests.vllm.pair import STEPS_AHEAD
from tests.vllm.tiers import PROMPT_COUNT, PROMPT_TOKENS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

WHOLE = PROMPT_TOKENS - 1
HALF = 160


@pytest.mark.core
def test_evicted_prompts_return_from_main_memory_and_disk(run_job: RunJob) -> None:
    found = run_job(
        "tests.vllm.tiers:conversations",
        model="tiny-llama-deep",
        tensor_parallel_size=1,
        stages=1,
        host_blocks=20,
        disk_blocks=100,
        has_storm=False,
    )
    assert found["again"] == found["split"] == found["first"]
    assert found["cached"] == [WHOLE] * PROMPT_COUNT
    assert found["received"] == [HALF] * PROMPT_COUNT
    assert found["blocks"]["DISK"] == 10 * PROMPT_COUNT


@pytest.mark.parametrize(
    ("model", "tensor_parallel_size", "stages", "host_blocks", "disk_blocks", "engine_args"),
    [
        ("tiny-llama-deep", 1, 1, 20, 100, ""),
        ("tiny-llama-deep", 1, 1, 20, 100, STEPS_AHEAD),
        ("tiny-llama", 2, 1, 120, 0, ""),
        ("tiny-llama", 2, 1, 120, 0, STEPS_AHEAD),
        ("tiny-llama", 1, 2, 120, 0, ""),
    ],
)
def test_evicted_prompts_return_with_equal_answers(
    run_job: RunJob,
    model: str,
    tensor_parallel_size: int,
    stages: int,
    host_blocks: int,
    disk_blocks: int,
    engine_args: str,
) -> None:
    found = run_job(
        "tests.vllm.tiers:conversations",
        model=model,
        tensor_parallel_size=tensor_parallel_size,
        stages=stages,
        host_blocks=host_blocks,
        disk_blocks=disk_blocks,
        engine_args=engine_args,
    )
    assert found["again"] == found["split"] == found["first"]
    assert found["cached"] == [WHOLE] * PROMPT_COUNT
    # KV memory has 23 blocks, and prompts have 10 each.
    assert found["blocks"]["DEVICE"] <= 23
    assert found["blocks"]["DISK" if disk_blocks else "HOST"] == 10 * PROMPT_COUNT
    assert "HOST" in found["load_times"]
    assert all(load_s > 0 for load_s in found["load_times"].values())
    assert found["after_reset"] == 0
    cached, alone = found["scored"]
    assert len(cached) == PROMPT_TOKENS - 1
    assert cached == pytest.approx(alone, abs=1e-3)
    assert found["received"] == [HALF] * PROMPT_COUNT
    # A prefill computes its last block, because it needs the last token's output.
    assert found["prefill_cached"] == [WHOLE - 32] * PROMPT_COUNT
    if not disk_blocks:
        # What main memory had was sent from there, and then what was computed.
        assert found["sent"] == [[HALF, WHOLE - 32]] * PROMPT_COUNT
        assert found["after_low"] == WHOLE
    together, one_by_one = found["preempted"]
    assert together == one_by_one
    if disk_blocks:
        assert found["promised"] == {
            "kept": WHOLE,
            "tier": "HOST",
            "blocks": WHOLE // 32,
            "held": WHOLE,
            "unkept": 0,
            "of another": None,
            "renewed": WHOLE,
            "ended": 0,
            "no more": None,
            "broken": 0,
        }
        storm = found["storm"]
        assert "wrong" not in storm
        assert storm["right"] > 24
        # A turn that finds changed blocks on the disk succeeds without them.
        assert storm["blocks changed"] > 0


@pytest.mark.parametrize(
    ("fault", "at_once", "engine_args"),
    [("truncated", False, ""), ("changed", True, ""), ("changed", True, STEPS_AHEAD)],
)
def test_what_prefill_cannot_load_is_computed_with_equal_answers(
    run_job: RunJob, fault: str, at_once: bool, engine_args: str
) -> None:
    found = run_job(
        "tests.vllm.tier_faults:lost_disk",
        model="tiny-llama-deep",
        fault=fault,
        at_once=at_once,
        engine_args=engine_args,
    )
    assert found["answers"] == [found["plain"]] * 5
    assert found["changed"] > 0
    before, whole, broken, _, after = found["cached"]
    assert before == [0] * PROMPT_COUNT
    assert whole == [WHOLE - 32] * PROMPT_COUNT
    # A prompt with a block that cannot be loaded is computed from its first token on.
    assert 0 in broken
    assert after == [WHOLE - 32] * PROMPT_COUNT
    no_failure, still_none, failed, all_failed, no_more = found["failed_blocks"]
    assert no_failure == still_none == 0
    assert failed > 0
    assert no_more == all_failed
    assert found["left_blocks"] == [0, 0]
