"""Every service restarts under load, one after the other, and no request fails.

A client may retry once when a router reports that it drains.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import Draining, HeadraceError, WorkerGone
from tests.ports import free_port
from tests.suite.deployment import Suite, prompt_of, suite

STREAMS = 6
ANSWER_TOKENS = 20
# Long enough that requests are at every stage at each restart.
SETTINGS = (
    ("prefill", "model", "sim:prefill_s_per_token=0.001"),
    ("decode", "model", "sim:decode_step_s=0.02"),
    ("prefill", "member_ttl_s", "3"),
    ("decode", "member_ttl_s", "3"),
)


class Load:
    """Requests all the time, from clients that use both routers."""

    def __init__(self, ways: list[Suite]) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._ways = ways
        self._stop = asyncio.Event()
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._keep_asking(number)) for number in range(STREAMS)]
        try:
            yield
        finally:
            self._stop.set()
            await asyncio.gather(*tasks)

    async def moved_on(self, count: int = STREAMS) -> None:
        """Waits until `count` more answers have come, so that every restart meets requests in flight."""
        goal = self.counts["right"] + count
        async with asyncio.timeout(20):
            while self.counts["right"] < goal and not self.failures:
                await asyncio.sleep(0.02)

    async def _keep_asking(self, way: int) -> None:
        while not self._stop.is_set():
            number = next(self._numbers)
            prompt = prompt_of(30 + number % 120, number)
            tries = [self._ways[(way + attempt) % 2] for attempt in range(2)]
            try:
                outcome = await self._ask(tries, prompt)
            except HeadraceError as error:
                self.failures.append(f"request {number}: {error.reason}: {error.detail}")
                continue
            right = outcome == tries[0].expected(prompt, ANSWER_TOKENS)
            self.counts["right" if right else "wrong"] += 1

    async def _ask(self, ways: list[Suite], prompt: list[int]) -> tuple[int, ...]:
        placement = inference_pb2.PREFILL_PLACEMENT_REMOTE
        try:
            return (await ways[0].generate(prompt, ANSWER_TOKENS, placement=placement)).token_ids
        except (Draining, WorkerGone) as error:
            if "worker_id" in error.metadata:
                raise
            self.counts["asked another router"] += 1
        return (await ways[1].generate(prompt, ANSWER_TOKENS, placement=placement)).token_ids


async def restart(it: Suite, name: str) -> None:
    """Stops a process by SIGTERM and restarts it on the same address."""
    assert await it.terminate(name) == 0, name
    await it.restart(name)


async def connected(way: Suite) -> None:
    """A channel to a router that was away reconnects only after a pause."""
    async with asyncio.timeout(15):
        await way.channel.channel_ready()


async def test_a_rolling_restart_of_every_service_fails_no_request(tmp_path: Path) -> None:
    # Routers and registry restart on their addresses, which must stay free in between.
    listen = [(name, "listen", f"127.0.0.1:{free_port()}") for name in ("registry", "router")]
    settings = (*SETTINGS, *listen)
    async with suite(tmp_path, prefill_count=2, decode_count=2, settings=settings) as it:
        other = await it.add("router-1", "router", f"--listen=127.0.0.1:{free_port()}")
        async with it.through(other) as by_other:
            await by_other.wait_joined(2, 2)
            load = Load([it, by_other])
            async with load.running():
                await load.moved_on()
                for name in ("decode-0", "decode-1", "prefill-0", "prefill-1"):
                    await restart(it, name)
                    for way in (it, by_other):
                        await way.wait_joined(2, 2)
                    await load.moved_on()
                for name in ("registry", "router", "router-1"):
                    await restart(it, name)
                    # The next router restarts once the clients of this one have reconnected.
                    for way in (it, by_other):
                        await connected(way)
                        await way.wait_joined(2, 2)
                    await load.moved_on()
            assert load.failures == []
            assert not load.counts["wrong"]
