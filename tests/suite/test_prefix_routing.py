"""Requests are routed by prefix-cache overlap, also after restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace_cli.client import list_members
from tests.suite.deployment import PROMPT_VOCABULARY, Suite, greedy, prompt_of, suite
from tests.waiting import until

BLOCK = 32
DECODES = ("decode-0", "decode-1", "decode-2")


async def turn(it: Suite, prompt: list[int]) -> tuple[list[int], int, str]:
    """The conversation with its answer, the tokens that decode had cached, and the decode worker."""
    outcome = await it.generate(prompt, 8)
    assert outcome.token_ids == it.expected(prompt, 8)
    last = outcome.last
    await until_known(it, prompt, last.timing.decode_worker_id)
    return (
        [*prompt, *(token % PROMPT_VOCABULARY for token in outcome.token_ids)],
        last.usage.decode_cached_tokens,
        last.timing.decode_worker_id,
    )


async def until_known(it: Suite, prompt: list[int], home: str) -> None:
    """Waits until the router's index has the whole blocks of a prompt for a worker."""
    whole = (len(prompt) - 1) // BLOCK * BLOCK

    async def known() -> bool:
        candidates = (await it.operator.explain(greedy(prompt, 1))).candidates
        cached = {one.worker_id: one.cached_tokens for one in candidates}
        return cached.get(home, 0) >= whole

    await until(known, 15.0, f"{home} has {whole} tokens", 0.02)


async def test_cached_prefixes_are_found_after_registry_and_router_restart(
    tmp_path: Path,
) -> None:
    async with suite(tmp_path, decode_count=len(DECODES)) as it:
        prompts = [prompt_of(6 * BLOCK, seed) for seed in range(6)]
        homes = [(await turn(it, prompt))[2] for prompt in prompts]
        it.kill("registry")
        await it.restart("registry")

        async def all_are_back() -> bool:
            return len(await list_members(it.deployment.registry)) > len(DECODES)

        # The members provide the hash key that they all use.
        await until(all_are_back, 20.0, interval_s=0.05)
        it.kill("router")
        await it.restart("router")
        async with asyncio.timeout(20):
            await it.channel.channel_ready()
        await it.wait_joined(1, len(DECODES))
        for prompt, home in zip(prompts, homes, strict=True):
            await until_known(it, prompt, home)
        for prompt, home in zip(prompts, homes, strict=True):
            _, cached, place = await turn(it, prompt)
            assert (cached, place) == (5 * BLOCK, home)
