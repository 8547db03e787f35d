"""KV that has left KV memory on a CUDA device returns from main memory and disk. Slow: engines load and compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.test_pair import differ, require_device, tokens
from tests.vllm.jobs import run_job
from tests.vllm.tiers import KV_MEMORY_BLOCKS, PROMPT_COUNT, PROMPT_TOKENS

MODEL = "models/tiny-llama-deep"
WHOLE = PROMPT_TOKENS - 1

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module", autouse=True)
def _require_device() -> None:
    require_device(Path(MODEL))


@pytest.mark.parametrize(
    ("dtype", "eager", "host_blocks", "disk_blocks"),
    [("float32", True, 20, 100), ("bfloat16", False, 120, 0)],
    ids=["disk", "graphs"],
)
def test_evicted_prompts_return_with_equal_answers(
    dtype: str, eager: bool, host_blocks: int, disk_blocks: int
) -> None:
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
