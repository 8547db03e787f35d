"""The steps of vLLM's scheduler with our order and budget, without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.conftest import IMPORTS_VLLM

pytestmark = IMPORTS_VLLM
STEP_TOKENS = 64


def new_scheduler() -> Any:
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from headrace_engine.vllm.scheduler.budget_scheduler import BudgetScheduler

    config = EngineArgs(
        model="models/tiny-llama",
        max_model_len=512,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=8,
        enable_prefix_caching=False,
        block_size=16,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = 100
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return BudgetScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(100, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
        hash_block_size=16,
    )


def new_request(name: str, tokens: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=8)
    return Request(name, list(range(5, 5 + tokens)), sampling, None)


@pytest.mark.parametrize("prompts", [1, 2])
def test_an_answer_with_its_kv_waits_for_no_begun_prompt(prompts: int) -> None:
    scheduler = new_scheduler()
    for number in range(prompts):
        scheduler.add_request(new_request(f"prompt-{number}", 400))
    begun = scheduler.schedule().num_scheduled_tokens
    assert begun == {"prompt-0": STEP_TOKENS}
    answer = new_request("answer", 33)
    scheduler.kv_cache_manager.allocate_slots(answer, 32)
    answer.num_computed_tokens = 32
    scheduler.requests["answer"] = answer
    scheduler.kv_holding_waiting.add_request(answer)
    step = scheduler.schedule().num_scheduled_tokens
    assert step == {"prompt-0": STEP_TOKENS - 1, "answer": 1}
    # The next step has all its tokens again.
    assert sum(scheduler.schedule().num_scheduled_tokens.values()) == STEP_TOKENS
