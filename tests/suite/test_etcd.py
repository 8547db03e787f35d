"""The registry over a real etcd: requests succeed while etcd is away, and membership recovers.

The test has a real clock, because etcd counts leases by its own.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.inference.v1 import inference_pb2
from tests.component.registry.harness import running_etcd
from tests.suite.deployment import prompt_of, suite
from tests.suite.load import load

MEMBER_TTL_S = 3.0
# Longer than two leases.
AWAY_S = 7.0
SETTINGS = (
    ("decode", "model", "sim:decode_step_s=0.02"),
    ("prefill", "lease_ttl_s", str(MEMBER_TTL_S / 2)),
    ("decode", "lease_ttl_s", str(MEMBER_TTL_S / 2)),
)


@pytest.mark.core
@pytest.mark.etcd
async def test_etcd_away_for_longer_than_leases_last_fails_no_request(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as etcd:
        async with suite(
            tmp_path,
            prefill_count=2,
            decode_count=2,
            store=f"etcd://127.0.0.1:{etcd.port}",
            settings=SETTINGS,
        ) as it:
            async with load(it, streams=3) as answers:
                await answers.more(5)
                etcd.kill()
                await asyncio.sleep(AWAY_S)
                await answers.more(5)
                etcd.start()
                # Workers with expired leases register again.
                await asyncio.sleep(2 * MEMBER_TTL_S)
                await answers.more(5)
            await it.wait_joined(2, 2)
            # The watch works: a leaving worker disappears and a returning one appears.
            assert await it.terminate("decode-1") == 0
            await it.wait_joined(2, 1)
            await it.restart("decode-1")
            await it.wait_joined(2, 2)
            prompt = prompt_of(60, 9_999)
            outcome = await it.generate(prompt, 4, placement=inference_pb2.PREFILL_PLACEMENT_REMOTE)
            assert outcome.token_ids == it.expected(prompt, 4)
