"""After many requests, also aborted ones, both engines have freed every block and use no more memory."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import RunJob
from tests.vllm.soak import BLOCK_COUNT, SAMPLES, SoakResult

IDLE = {
    "running_requests": 0,
    "waiting_requests": 0,
    "used_blocks": 0,
    "total_blocks": BLOCK_COUNT - 1,
}
GROWTH_MIB = 64

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]


@pytest.mark.parametrize("requests", [60, 500])
def test_mixed_requests_free_every_block(run_job: RunJob, requests: int) -> None:
    result = SoakResult(**run_job("tests.vllm.soak:measure", model="tiny-llama", requests=requests))
    print(result)
    assert result.wrong == []
    assert result.aborted > requests * 0.1
    assert result.remote > requests * 0.5
    assert result.start == result.end == {"prefill": IDLE, "decode": IDLE}
    # Engines first touch parts of their memory during the first half.
    warm, end = result.memory_mib[SAMPLES // 2 - 1], result.memory_mib[-1]
    assert warm.keys() == end.keys() == {"service", "decode", "prefill"}
    assert all(end[role] - warm[role] < GROWTH_MIB for role in end), result.memory_mib
