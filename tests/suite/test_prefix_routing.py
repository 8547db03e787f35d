"""Requests are routed by prefix-cache overlap, also after restarts."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from headrace_cli.client import list_members
from headrace_common.errors import HeadraceError
from tests.suite.deployment import PROMPT_VOCABULARY, Suite, greedy, prompt_of, suite

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
    give_up = time.monotonic() + 15
    while True:
        candidates = (await it.client.explain(greedy(prompt, 1))).candidates
        cached = {one.worker_id: one.cached_tokens for one in candidates}
        if cached.get(home, 0) >= whole:
            return
        assert time.monotonic() < give_up, (
            f"{home} has {whole} tokens, the router knows of {cached}"
        )
        await asyncio.sleep(0.02)


async def until_answered(it: Suite, prompt: list[int], timeout_s: float = 20.0) -> None:
    """Waits until a router has started and has workers."""
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            await it.generate(prompt, 1)
            return
        except HeadraceError:
            assert time.monotonic() < give_up
            await asyncio.sleep(0.2)


async def test_conversations_are_routed_to_their_cached_prefix(tmp_path: Path) -> None:
    async with suite(tmp_path, decode_count=len(DECODES)) as it:
        homes: dict[int, str] = {}
        prompts = {seed: prompt_of(4 * BLOCK + 5, seed) for seed in range(4)}
        for round_number in range(4):
            for seed, prompt in prompts.items():
                longer, cached, home = await turn(it, prompt)
                if round_number:
                    assert home == homes[seed]
                    assert cached >= 4 * BLOCK
                homes[seed] = home
                prompts[seed] = [*longer, *prompt_of(20, 100 * round_number + seed)]


async def test_cached_prefixes_are_found_after_registry_and_router_restart(
    tmp_path: Path,
) -> None:
    async with suite(tmp_path, decode_count=len(DECODES)) as it:
        prompts = [prompt_of(6 * BLOCK, seed) for seed in range(6)]
        homes = [(await turn(it, prompt))[2] for prompt in prompts]
        it.kill("registry")
        await it.restart("registry")
        # The members provide the hash key that they all use.
        async with asyncio.timeout(20):
            while len(await list_members(it.deployment.registry)) < len(DECODES) + 1:
                await asyncio.sleep(0.05)
        it.kill("router")
        await it.restart("router")
        await until_answered(it, prompt_of(3, 99))
        for prompt, home in zip(prompts, homes, strict=True):
            await until_known(it, prompt, home)
        for prompt, home in zip(prompts, homes, strict=True):
            _, cached, place = await turn(it, prompt)
            assert (cached, place) == (5 * BLOCK, home)
