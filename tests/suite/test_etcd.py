"""The registry over a real etcd: requests succeed while etcd is away, and membership recovers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.inference.v1 import inference_pb2
from tests.component.registry.harness import running_etcd
from tests.suite.deployment import Suite, prompt_of, suite

MEMBER_TTL_S = 3.0
# Several times the length of a lease.
AWAY_S = 10.0
SETTINGS = (
    ("decode", "model", "sim:decode_step_s=0.02"),
    ("prefill", "member_ttl_s", str(MEMBER_TTL_S)),
    ("decode", "member_ttl_s", str(MEMBER_TTL_S)),
)


@contextlib.asynccontextmanager
async def load(it: Suite, streams: int) -> AsyncIterator[list[float]]:
    """Sends requests without a pause. Yields the times at which correct answers ended. A failure fails the test."""
    ended_s: list[float] = []
    stop = asyncio.Event()

    async def ask(seed: int) -> None:
        while not stop.is_set():
            seed += streams
            prompt = prompt_of(40, seed)
            outcome = await it.generate(prompt, 5)
            assert outcome.token_ids == it.expected(prompt, 5)
            ended_s.append(time.monotonic())

    tasks = [asyncio.create_task(ask(number)) for number in range(streams)]
    try:
        yield ended_s
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def more(ended_s: list[float], count: int) -> None:
    """Waits until `count` more answers have ended."""
    goal = len(ended_s) + count
    async with asyncio.timeout(20):
        while len(ended_s) < goal:
            await asyncio.sleep(0.02)


async def counts(it: Suite) -> tuple[int, int]:
    """The prefill and decode workers that the router has."""
    (model,) = await it.client.models()
    return model.prefill_worker_count, model.decode_worker_count


async def until_counts(it: Suite, wanted: tuple[int, int], timeout_s: float) -> None:
    give_up = time.monotonic() + timeout_s
    while (seen := await counts(it)) != wanted:
        assert time.monotonic() < give_up, f"the router sees {seen}, not {wanted}"
        await asyncio.sleep(0.1)


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
            assert await counts(it) == (2, 2)
            async with load(it, streams=3) as ended_s:
                await more(ended_s, 5)
                etcd.kill()
                await asyncio.sleep(AWAY_S)
                await more(ended_s, 5)
                etcd.start()
                # Workers with expired leases register again.
                await asyncio.sleep(2 * MEMBER_TTL_S)
                await more(ended_s, 5)
            await until_counts(it, (2, 2), 30)
            # The watch works: a leaving worker disappears and a returning one appears.
            assert await it.terminate("decode-1") == 0
            await until_counts(it, (2, 1), 30)
            await it.restart("decode-1")
            await until_counts(it, (2, 2), 30)
            prompt = prompt_of(60, 9_999)
            outcome = await it.generate(prompt, 4, placement=inference_pb2.PREFILL_PLACEMENT_REMOTE)
            assert outcome.token_ids == it.expected(prompt, 4)
