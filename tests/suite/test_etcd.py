"""The registry over a real etcd: serving goes on while etcd is away, and membership recovers."""

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

AWAY_S = 20.0
SLOW_DECODE = ("decode", "model", "sim:decode_step_s=0.02")


@contextlib.asynccontextmanager
async def load(it: Suite, streams: int) -> AsyncIterator[list[float]]:
    """Requests without a pause; yields the times at which right answers ended. Any failure fails the test."""
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


async def counts(it: Suite) -> tuple[int, int]:
    """Prefill and decode workers that the router sees."""
    (model,) = await it.client.models()
    return model.prefill_worker_count, model.decode_worker_count


async def until_counts(it: Suite, wanted: tuple[int, int], timeout_s: float) -> None:
    give_up = time.monotonic() + timeout_s
    while (seen := await counts(it)) != wanted:
        assert time.monotonic() < give_up, f"the router sees {seen}, not {wanted}"
        await asyncio.sleep(0.1)


@pytest.mark.etcd
@pytest.mark.timeout(120)
async def test_etcd_away_for_20_s_fails_no_request(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as etcd:
        async with suite(
            tmp_path,
            prefill_count=2,
            decode_count=2,
            store=f"etcd://127.0.0.1:{etcd.port}",
            settings=(SLOW_DECODE,),
        ) as it:
            assert await counts(it) == (2, 2)
            async with load(it, streams=3) as ended_s:
                await asyncio.sleep(1)
                etcd.kill()
                killed_s = time.monotonic()
                await asyncio.sleep(AWAY_S)
                etcd.start()
                back_s = time.monotonic()
                await asyncio.sleep(5)
            assert sum(killed_s < moment < back_s for moment in ended_s) > 20
            assert sum(back_s < moment for moment in ended_s) > 5
            await until_counts(it, (2, 2), 15)
            # The watch lives: a worker that goes is noticed, and so is one that comes back.
            assert await it.terminate("decode-1") == 0
            await until_counts(it, (2, 1), 15)
            await it.restart("decode-1")
            await until_counts(it, (2, 2), 15)
            prompt = prompt_of(60, 9_999)
            outcome = await it.generate(prompt, 4, placement=inference_pb2.PREFILL_PLACEMENT_REMOTE)
            assert outcome.token_ids == it.expected(prompt, 4)
