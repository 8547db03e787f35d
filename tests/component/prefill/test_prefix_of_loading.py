"""A prefill worker fetches what decode still loads from its main memory. The fetch waits for the load."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import pytest

from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import TransferTimeout
from headrace_kv.prefix.events import Tier
from tests.component.engine.kv_event_workers import random_prompt
from tests.component.engine.sim.support import hold_loads, host_blocks
from tests.component.prefill.fetching import Reserved, Workers, fetching_workers
from tests.waiting import until

MODEL = "sim:context=512"
# A conversation of 64 tokens fills 8 blocks of decode's KV memory, and another prompt 10.
DECODE_BLOCKS = 16
FIRST = list(range(100, 140))
MORE = list(range(900, 921))
ANSWER_TOKENS = 24
OTHER_TOKENS = 80
GAP_S = 0.2


@dataclass(slots=True)
class LoadingFetch:
    """A second turn, of which prefill wants a prefix that decode loads once `go_on` is set."""

    workers: Workers
    go_on: threading.Event
    request: Reserved
    running: asyncio.Task[prefill_pb2.TaskDone]

    async def assert_right(self) -> None:
        """The first token depends on every byte in prefill's memory."""
        expected = self.workers.expected(self.request.prompt, self.request.token_count)
        assert await self.request.answer() == expected
        assert (await self.running).reason == ""


@asynccontextmanager
async def loading_fetch(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> AsyncIterator[LoadingFetch]:
    decode = {"tiers": host_blocks(60), "num_gpu_blocks_override": DECODE_BLOCKS}
    async with fetching_workers(model=MODEL, decode=decode, timeout_s=timeout_s) as workers:
        turn = await workers.turn(FIRST, ANSWER_TOKENS)
        for number in range(2):
            await workers.turn(random_prompt(Random(number), OTHER_TOKENS), 2)
        assert workers.fetches == []
        prompt = [*FIRST, *turn.tokens, *MORE]
        go_on = hold_loads(monkeypatch)
        async with workers.reserved(prompt, 8) as request:
            # What was evicted counts as cached.
            assert request.reserved.start_token >= len(FIRST) + ANSWER_TOKENS - 8
            running = asyncio.create_task(request.prefill())
            await until(lambda: workers.prefill_receiver.active_count == 1)
            yield LoadingFetch(workers, go_on, request, running)


async def test_a_fetch_of_what_decode_loads_waits_for_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with loading_fetch(monkeypatch, timeout_s=60.0) as fetch:
        await asyncio.sleep(GAP_S)
        assert fetch.workers.prefill_receiver.lease_count == 0
        assert fetch.workers.fetches == []
        fetch.go_on.set()
        await fetch.assert_right()
        (record,) = fetch.workers.fetches
        assert record.reason == ""
        assert record.token_count >= ANSWER_TOKENS - 8
        assert fetch.workers.decode.tier_loads.loaded_blocks()[Tier.HOST] > 0


async def test_a_load_that_takes_longer_than_the_fetch_costs_its_time_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with loading_fetch(monkeypatch, timeout_s=GAP_S) as fetch:
        await until(lambda: bool(fetch.workers.fetches))
        assert [record.reason for record in fetch.workers.fetches] == [TransferTimeout.reason]
        assert fetch.workers.prefill_receiver.lease_count == 0
        fetch.go_on.set()
        await fetch.assert_right()
