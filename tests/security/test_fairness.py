"""A tenant with many requests at once leaves another one its share of the slots, through two routers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from headrace.inference.v1 import inference_pb2_grpc
from headrace_common.errors import DecodeFull, QueueFull
from headrace_common.rpc.status import error_from_rpc
from tests.suite.deployment import DEADLINE_S, Suite, greedy, prompt_of, suite
from tests.waiting import until

SLOTS = 4
LOOPS = 40
LONG_ANSWER_TOKENS = 100
SHORT_ANSWER_TOKENS = 5
ASKED = 6
KEYS = {"greedy": "the-key-of-the-greedy", "late": "the-key-of-the-late"}


@dataclass(slots=True)
class Greedy:
    """A tenant that asks for long answers in many loops. It retries after the delay that a router sends."""

    streams: Sequence[Suite]
    started: int = 0
    """Answers of which a token has arrived."""
    completed: int = 0
    rejected: int = 0

    async def loop(self, number: int) -> None:
        it = self.streams[number % len(self.streams)]
        while True:
            try:
                await self._answer(it, number)
            except (QueueFull, DecodeFull) as error:
                self.rejected += 1
                await asyncio.sleep(delay_s(error))

    async def _answer(self, it: Suite, number: int) -> None:
        prompt = prompt_of(40, number)
        found: list[int] = []
        async for token_ids in stream(it, "greedy", prompt, LONG_ANSWER_TOKENS):
            self.started += not found
            found += token_ids
        assert tuple(found) == it.expected(prompt, LONG_ANSWER_TOKENS)
        self.completed += 1


def delay_s(error: QueueFull | DecodeFull) -> float:
    """The delay after which to retry. Every rejection has one."""
    assert error.retry_after_s
    return error.retry_after_s


async def stream(
    it: Suite, tenant: str, prompt: Sequence[int], count: int
) -> AsyncIterator[Sequence[int]]:
    """The tokens of one answer. Raises HeadraceError."""
    stub: Any = inference_pb2_grpc.InferenceServiceStub(it.channel)
    metadata = (("x-api-key", KEYS[tenant]),)
    try:
        async for response in stub.Generate(
            greedy(prompt, count), metadata=metadata, timeout=DEADLINE_S
        ):
            if response.token_ids:
                yield response.token_ids
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error


@asynccontextmanager
async def crowded(folder: Path, routers_of_greedy: int) -> AsyncIterator[tuple[Suite, Greedy]]:
    """Two routers. The loops go to the first of them, or to both. Yields the second, once the slots are in use."""
    keys = folder / "keys"
    keys.write_text("".join(f"{key} {tenant}\n" for tenant, key in KEYS.items()))
    settings = (
        ("router", "api_keys_file", str(keys)),
        ("router", "admission_wait_s", "0.5"),
        ("decode", "model", "sim:decode_step_s=0.01"),
        ("decode", "max_num_seqs", str(SLOTS)),
    )
    async with AsyncExitStack() as held:
        it = await held.enter_async_context(suite(folder, settings=settings))
        child = await it.add("router-1", "router")
        other = await held.enter_async_context(it.through(child))
        await other.wait_joined(1, 1)
        client = Greedy([it, other][:routers_of_greedy])
        loops = [asyncio.create_task(client.loop(number)) for number in range(LOOPS)]
        try:
            # By then, each router has seen the requests of the other.
            await until(lambda: client.completed >= 3 * SLOTS and client.rejected > 0, DEADLINE_S)
            yield other, client
            for task in loops:
                if task.done():
                    task.result()
        finally:
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)


@pytest.mark.parametrize("routers_of_greedy", [1, 2])
async def test_a_tenant_with_one_request_at_a_time_is_served_beside_one_with_forty(
    tmp_path: Path, routers_of_greedy: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async with crowded(tmp_path, routers_of_greedy) as (it, client):
        started_meanwhile: list[int] = []
        for number in range(ASKED):
            before = client.started
            prompt = prompt_of(30, 1_000 + number)
            found: list[int] = []
            async for token_ids in stream(it, "late", prompt, SHORT_ANSWER_TOKENS):
                if not found:
                    started_meanwhile.append(client.started - before)
                found += token_ids
            assert tuple(found) == it.expected(prompt, SHORT_ANSWER_TOKENS)
        with capsys.disabled():
            print(f"\nanswers begun before the other tenant's: {started_meanwhile}")
        # In the time of one answer, each slot begins one. First come would be a turn of all loops. A busy machine may
        # stop one process for longer.
        assert sorted(started_meanwhile)[-2] <= 2 * SLOTS
        # The slots are in use meanwhile: one at most is free for the next request of another router.
        await it.until("decode-0", lambda status: status.running_requests >= SLOTS - 1)
