"""vLLM's own offloading beside our connector: offloaded KV is loaded, and only the rest is transferred."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import RunJob
from tests.vllm.pair import STEPS_AHEAD
from tests.vllm.tiers import PROMPT_COUNT, PROMPT_TOKENS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]

WHOLE = PROMPT_TOKENS - 1
HALF = 160


@pytest.mark.parametrize("engine_args", ["", STEPS_AHEAD])
def test_offloaded_prompts_return_with_equal_answers(run_job: RunJob, engine_args: str) -> None:
    found = run_job(
        "tests.vllm.offloading:conversations", model="tiny-llama-deep", engine_args=engine_args
    )
    assert found["again"] == found["split"] == found["first"]
    assert found["cached"] == [WHOLE] * PROMPT_COUNT
    # Decode has loaded the first half, which prefill does not send.
    assert found["received"] == [HALF] * PROMPT_COUNT
    assert all(cached >= WHOLE - 32 for cached in found["prefill_cached"])
    assert found["wrong"] == 0
    assert found["left_blocks"] == [0, 0]
