"""Promises to keep KV: they outlast the pressure of other prompts, and belong to their tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2, keep_pb2
from headrace_client.client import Client
from headrace_common.durations import duration_from_seconds, seconds_from_duration
from headrace_common.errors import InvalidRequest, NotFound
from tests.suite.deployment import PROMPT_VOCABULARY, Suite, greedy, prompt_of, suite
from tests.waiting import until

BLOCK = 32
KEYS = {"a": "the-key-of-a-tenant", "b": "the-key-of-another"}
# KV memory of 64 blocks, and 160 below it, of which promises hold half at most and one tenant a quarter. Where
# computing takes no time, no load is worth it, and placement prefers no worker for it.
SETTINGS = (
    ("prefill", "model", "sim:prefill_s_per_token=0.0002"),
    ("decode", "kv_host_gib", str(160 * 4096 / 2**30)),
    ("decode", "num_gpu_blocks_override", "64"),
)


@asynccontextmanager
async def deployed(
    folder: Path, *settings: tuple[str, str, str], **topology: Any
) -> AsyncIterator[Suite]:
    keys = folder / "keys"
    keys.write_text("".join(f"{key} {tenant}\n" for tenant, key in KEYS.items()))
    every = (*SETTINGS, ("router", "api_keys_file", str(keys)), *settings)
    async with suite(folder, settings=every, **topology) as it:
        await it.wait_joined(1, topology.get("decode_count", 1))
        yield it


class Tenant:
    """Calls as one tenant."""

    def __init__(self, it: Suite, name: str) -> None:
        self._client = Client(it.channel, api_key=KEYS[name])

    async def ask(
        self, prompt: list[int], keep_s: float | None = None, **sampling: Any
    ) -> inference_pb2.GenerateResponse:
        """The last message of an answer of 8 tokens."""
        request = greedy(prompt, 8, **sampling)
        if keep_s is not None:
            request.keep.CopyFrom(duration_from_seconds(keep_s))
        responses = [response async for response in self._client.stream(request, 30.0)]
        tokens = [token for response in responses for token in response.token_ids]
        self.conversation = [*prompt, *(token % PROMPT_VOCABULARY for token in tokens)]
        return responses[-1]

    async def keep(self, promise_id: str, seconds: float = 0.0) -> keep_pb2.Kept:
        return await self._client.keep(promise_id, seconds)


async def press(it: Suite, tenant: Tenant, count: int = 96) -> None:
    """Other prompts: 6 blocks each, more than two workers keep. Returns when the router has seen their end."""
    for start in range(0, count, 8):
        await asyncio.gather(
            *(tenant.ask(prompt_of(6 * BLOCK, 1_000 + start + each)) for each in range(8))
        )

    async def idle() -> bool:
        candidates = (await it.operator.explain(greedy(prompt_of(BLOCK, 0), 1))).candidates
        return not any(one.held_tokens for one in candidates)

    await until(idle, 15.0, "the load of all workers is gone", 0.02)


async def test_promised_conversations_outlast_pressure_where_they_are(tmp_path: Path) -> None:
    async with deployed(tmp_path, decode_count=2) as it:
        kept, other = Tenant(it, "a"), Tenant(it, "b")
        turns = []
        for seed in range(6):
            last = await kept.ask(prompt_of(6 * BLOCK, seed), keep_s=600)
            assert last.usage.kept.tokens == 6 * BLOCK
            assert last.usage.kept.tier == "host"
            assert seconds_from_duration(last.usage.kept.duration) == 600
            turns.append((last, kept.conversation))
        unkept = await kept.ask(prompt_of(6 * BLOCK, 99))
        assert not unkept.usage.HasField("kept")
        await press(it, other)
        for last, conversation in turns:
            again = await kept.ask(conversation)
            assert again.usage.decode_cached_tokens == last.usage.kept.tokens
            assert again.timing.decode_worker_id == last.timing.decode_worker_id
        again = await kept.ask(prompt_of(6 * BLOCK, 99))
        assert again.usage.decode_cached_tokens == 0


async def test_a_promise_is_renewed_and_ended_by_its_tenant_alone(tmp_path: Path) -> None:
    async with deployed(tmp_path) as it:
        owner, other = Tenant(it, "a"), Tenant(it, "b")
        promise = (await owner.ask(prompt_of(6 * BLOCK, 1), keep_s=60)).usage.kept
        for call in (other.keep(promise.id), other.keep(promise.id, 30), owner.keep("x" * 49)):
            with pytest.raises(NotFound):
                await call
        with pytest.raises(InvalidRequest):
            await owner.keep(promise.id, 3_601)
        renewed = await owner.keep(promise.id, 30)
        assert (renewed.id, renewed.tokens) == (promise.id, promise.tokens)
        assert seconds_from_duration(renewed.duration) == 30
        ended = await owner.keep(promise.id)
        assert (ended.tokens, ended.reason) == (0, "it was ended")
        with pytest.raises(NotFound):
            await owner.keep(promise.id, 30)
        # A worker's end is the end of its promises.
        promise = (await owner.ask(prompt_of(6 * BLOCK, 2), keep_s=60)).usage.kept
        it.kill("decode-0")
        await it.restart("decode-0")
        await it.wait_joined(1, 1)
        with pytest.raises(NotFound):
            await owner.keep(promise.id, 30)
