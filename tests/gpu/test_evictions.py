"""KV that has left KV memory on a device returns from main memory and disk. Slow: engines load and compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.devices import CPU, CUDA
from tests.gpu.test_pair import differ, require_engines, tokens
from tests.vllm.jobs import run_job
from tests.vllm.tiers import KV_MEMORY_BLOCKS, PROMPT_COUNT, PROMPT_TOKENS

MODEL = "models/tiny-llama-deep"
WHOLE = PROMPT_TOKENS - 1

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize(
    ("device", "dtype", "eager", "host_blocks", "disk_blocks"),
    [
        (CPU, "float32", True, 20, 100),
        pytest.param(CUDA, "float32", True, 20, 100, id="disk", marks=pytest.mark.gpu),
        pytest.param(CUDA, "bfloat16", False, 120, 0, id="graphs", marks=pytest.mark.gpu),
    ],
)
def test_evicted_prompts_return_with_equal_answers(
    device: str, dtype: str, eager: bool, host_blocks: int, disk_blocks: int
) -> None:
    require_engines(device, Path(MODEL))
    found = run_job(
        "tests.gpu.evictions:measure",
        model=MODEL,
        dtype=dtype,
        enforce_eager=eager,
        host_blocks=host_blocks,
        disk_blocks=disk_blocks,
    )
    first, again, split = (
        [tokens(one) for one in found[name]] for name in ("first", "again", "split")
    )
    assert [len(one.token_ids) for one in first] == [16] * PROMPT_COUNT
    for plain, other, pair in zip(first, again, split, strict=True):
        assert not differ(plain, other)
        assert not differ(plain, pair), "with KV of prefill"
    assert found["cached"] == [WHOLE] * PROMPT_COUNT
    # A prefill computes its last block, because it needs the last token's output.
    assert found["prefill_cached"] == [WHOLE - 32] * PROMPT_COUNT
    assert found["blocks"]["DEVICE"] <= KV_MEMORY_BLOCKS
    assert found["blocks"]["DISK" if disk_blocks else "HOST"] == 10 * PROMPT_COUNT
    assert found["load_times"]["HOST"] > 0
