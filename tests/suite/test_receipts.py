"""What requests cost: tenants, the operator and idle time add up to the workers' time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.receipts import check_cancelled, check_sums, check_tenants, with_keys
from tests.suite.deployment import greedy, prompt_of, suite


@pytest.mark.timeout(240)
async def test_tenants_operator_and_idle_time_add_up_beside_a_killed_worker(tmp_path: Path) -> None:
    settings = (
        ("prefill", "model", "sim:prefill_s_per_token=0.0002"),
        ("decode", "model", "sim:decode_step_s=0.02"),
        with_keys(tmp_path),
    )
    async with suite(tmp_path, settings=settings) as it:
        await it.wait_joined(1, 1)
        await check_cancelled(it, greedy(prompt_of(64, 99), 250))
        ratio = await check_tenants(it, [greedy(prompt_of(64, n), 250) for n in range(16)])
        # A busy machine lengthens single steps, of which not all have the same requests.
        assert ratio == pytest.approx(3.0, rel=0.2)
        await it.add("decode-1", "decode-0")
        total = await check_sums(it, [greedy(prompt_of(64, 100 + n), 90) for n in range(16)])
        assert total == pytest.approx(1.0, rel=0.03)
