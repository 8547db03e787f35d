"""A cancelled request ends at every stage within a second and does not affect other requests."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace.worker.v1 import worker_pb2
from tests.suite.deployment import Suite, greedy, prompt_of, suite

EFFECT_S = 1.0
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
# One step of prefill takes 0.1 s and cannot be interrupted.
SLOW_PREFILL = (
    ("prefill", "model", "sim:prefill_s_per_token=0.002"),
    ("prefill", "max_num_batched_tokens", "64"),
)

Status = worker_pb2.WatchStatusResponse


class Asked:
    """One request that its client cancels."""

    def __init__(self, it: Suite, prompt: list[int], count: int, placement: Any = REMOTE) -> None:
        stub = inference_pb2_grpc.InferenceServiceStub(it.channel)
        self._call: Any = stub.Generate(greedy(prompt, count, placement), timeout=60)
        self._read = asyncio.create_task(self._call.read())

    async def first(self) -> None:
        """Waits until the first token has arrived."""
        await asyncio.wait_for(asyncio.shield(self._read), 20)

    async def go_away(self) -> None:
        self._call.cancel()
        await asyncio.gather(self._read, return_exceptions=True)


async def until(
    it: Suite, name: str, check: Callable[[Status], bool], timeout_s: float = EFFECT_S
) -> None:
    """Waits until a status satisfies `check`: within the limit, or on a busy machine by the tenth poll."""
    started_s = time.monotonic()
    for looks in itertools.count(1):
        status = await it.status(name)
        if check(status):
            return
        took_s = time.monotonic() - started_s
        assert took_s < timeout_s or looks < 10, f"{name} after {took_s:.2f} s: {status}"
        await asyncio.sleep(0.02)


def holds_nothing(status: Status) -> bool:
    return not (
        status.running_requests
        or status.waiting_requests
        or status.reserved_blocks
        or status.active_transfers
    )


async def in_the_queue(it: Suite) -> list[Asked]:
    """The only slot of the prefill worker is taken. The second prompt waits in the router."""
    asked = [Asked(it, prompt_of(2_000, number), 4) for number in range(2)]
    await until(it, "decode-0", lambda status: status.active_transfers == 2, 10)
    await until(it, "prefill-0", lambda status: status.running_requests == 1, 10)
    return asked


async def in_prefill(it: Suite) -> list[Asked]:
    asked = [Asked(it, prompt_of(2_000, 3), 4)]
    await until(it, "prefill-0", lambda status: status.running_requests == 1, 10)
    return asked


async def in_decode(it: Suite) -> list[Asked]:
    asked = [Asked(it, prompt_of(40, 4), 2_000)]
    await asked[0].first()
    return asked


async def in_local_prefill(it: Suite) -> list[Asked]:
    local = inference_pb2.PREFILL_PLACEMENT_LOCAL
    asked = [Asked(it, prompt_of(2_000, 5), 4, local)]
    await until(it, "decode-0", lambda status: status.running_requests == 1, 10)
    return asked


async def test_a_cancellation_takes_effect_at_every_stage(tmp_path: Path) -> None:
    decode = ("decode", "model", "sim:decode_step_s=0.02,prefill_s_per_token=0.002")
    settings = (
        *SLOW_PREFILL,
        decode,
        ("decode", "max_num_batched_tokens", "64"),
        ("prefill", "max_num_seqs", "1"),
    )
    stages: tuple[Callable[[Suite], Awaitable[list[Asked]]], ...] = (
        in_the_queue,
        in_prefill,
        in_decode,
        in_local_prefill,
    )
    async with suite(tmp_path, settings=settings) as it:
        for stage in stages:
            asked = await stage(it)
            for one in reversed(asked):
                await one.go_away()
            for name in ("decode-0", "prefill-0"):
                await until(it, name, holds_nothing)
        # The queued prompt has not been computed in the meantime.
        prompt = prompt_of(40, 9)
        outcome = await it.generate(prompt, 4, placement=REMOTE)
        assert outcome.token_ids == it.expected(prompt, 4)


async def test_a_cancelled_queued_prompt_is_never_computed(tmp_path: Path) -> None:
    settings = (*SLOW_PREFILL, ("prefill", "max_num_seqs", "1"))
    async with suite(tmp_path, settings=settings) as it:
        first, second = await in_the_queue(it)
        await second.go_away()
        await until(it, "decode-0", lambda status: status.active_transfers == 1)
        await first.go_away()
        await until(it, "prefill-0", holds_nothing)
        # If the second task had been handed out, it would run now.
        for _ in range(10):
            assert holds_nothing(await it.status("prefill-0"))
            await asyncio.sleep(0.05)


async def ttft_s(it: Suite, seed: int) -> float:
    started_s = time.monotonic()
    asked = Asked(it, prompt_of(200, seed), 2)
    await asked.first()
    took_s = time.monotonic() - started_s
    await asked.go_away()
    return took_s


async def test_ten_cancelled_long_prompts_do_not_delay_a_short_one(tmp_path: Path) -> None:
    settings = (*SLOW_PREFILL, ("prefill", "max_num_seqs", "4"))
    async with suite(tmp_path, settings=settings) as it:
        await ttft_s(it, 100)
        unloaded_s = await ttft_s(it, 101)
        long = [Asked(it, prompt_of(3_000, number), 4) for number in range(10)]
        await until(it, "prefill-0", lambda status: status.running_requests == 4, 10)
        # Ten prompts of six seconds each, all cancelled before they are computed.
        await asyncio.gather(*(one.go_away() for one in long))
        loaded_s = await ttft_s(it, 200)
        assert loaded_s < unloaded_s + 3, f"{loaded_s:.2f} s beside {unloaded_s:.2f} s"
        for name in ("decode-0", "prefill-0"):
            await until(it, name, holds_nothing)
