"""What requests cost on vLLM: tenants, the operator and idle time add up to the workers' time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.devices import require, shared
from tests.receipts import check_cancelled, check_sums, check_tenants, with_keys
from tests.suite.deployment import greedy, suite

MODEL = Path("models/tiny-llama")


@pytest.mark.vllm
@pytest.mark.timeout(280)
@pytest.mark.skipif(not MODEL.is_dir(), reason="the model is not there: make model")
async def test_tenants_operator_and_idle_time_add_up_beside_a_killed_worker(tmp_path: Path) -> None:
    require("cpu")
    settings = (*shared("cpu", dtype="float32", engine_args="--enforce-eager"), with_keys(tmp_path))
    async with suite(tmp_path, engine="vllm", model=str(MODEL), settings=settings) as it:
        await it.wait_joined(1, 1)

        def prompt_of(seed: int) -> list[int]:
            return [(7 * seed + 13 * index) % 400 + 8 for index in range(120)]

        await check_cancelled(it, greedy(prompt_of(99), 400))
        ratio = await check_tenants(it, [greedy(prompt_of(n), 200) for n in range(16)])
        # A busy machine lengthens single steps, of which not all have the same requests.
        assert 2.0 < ratio < 4.5
        await it.add("decode-1", "decode-0")
        total = await check_sums(it, [greedy(prompt_of(20 + n), 700) for n in range(16)])
        assert total == pytest.approx(1.0, rel=0.03)
