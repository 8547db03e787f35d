"""The policy changes the roles of workers of both roles while they serve."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from headrace_cli.commands.policy import set_policy
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import parse_settings
from tests.suite.deployment import VOCABULARY, Outcome, Suite, prompt_of, suite
from tests.waiting import until

MODEL = f"sim:vocabulary={VOCABULARY},prefill_s_per_token=0.0002,decode_step_s=0.002"
ONE, OTHER = "worker-0", "worker-1"


async def _ways(it: Suite, first: int, count: int = 8) -> set[tuple[str, str]]:
    """The prefill and decode workers of new prompts. All answers are correct, at the first attempt."""
    prompts = [prompt_of(200, seed) for seed in range(first, first + count)]
    outcomes: list[Outcome] = await asyncio.gather(*(it.generate(prompt, 6) for prompt in prompts))
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert outcome.token_ids == it.expected(prompt, 6)
        assert outcome.last.timing.attempts == 1
    timings = [outcome.last.timing for outcome in outcomes]
    return {(timing.prefill_worker_id, timing.decode_worker_id) for timing in timings}


async def test_roles_by_policy_apply_to_the_next_requests(tmp_path: Path) -> None:
    settings = (("worker", "model", MODEL),)
    sim = SimModel(parse_settings(MODEL))
    async with suite(
        tmp_path, sim=sim, prefill_count=0, decode_count=0, worker_count=2, settings=settings
    ) as it:
        seeds = iter(range(0, 1_000_000, 100))

        async def all_go(way: tuple[str, str]) -> bool:
            return await _ways(it, next(seeds)) == {way}

        for prefill, decode in ((ONE, OTHER), (OTHER, ONE)):
            roles = (f"worker_roles.{prefill}=prefill", f"worker_roles.{decode}=decode")
            await set_policy(it.deployment.registry, roles)
            await until(partial(all_go, (prefill, decode)), 20.0, "two pools")
            # It stays so, before and after the workers' times are known.
            for _ in range(4):
                assert await _ways(it, next(seeds), 16) == {(prefill, decode)}
        # The worker with the role prefill is the last one.
        it.kill(ONE)
        for _ in range(3):
            outcome = await it.generate(prompt_of(64, next(seeds)), 4)
            assert outcome.last.timing.decode_worker_id == OTHER
