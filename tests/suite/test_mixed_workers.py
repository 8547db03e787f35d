"""Prefill and decode workers of different TP and block size together, some of them incompatible."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import parse_settings
from tests.suite.deployment import VOCABULARY, Outcome, Suite, prompt_of, suite

MODEL = f"sim:heads=4,vocabulary={VOCABULARY}"
# Such blocks can only be copied whole, between workers that both use them.
WHOLE = f"{MODEL},block_format=token_inner"
SETTINGS = (
    ("prefill", "model", f"{MODEL},prefill_s_per_token=0.0005"),
    ("decode", "model", f"{MODEL},decode_step_s=0.002"),
    ("decode", "block_size", "16"),
    ("prefill", "block_size", "16"),
)
PREFILLS = {"prefill-0", "prefill-1", "prefill-2"}
DECODES = {"decode-0", "decode-1"}


async def _start_others(it: Suite) -> None:
    await asyncio.gather(
        it.add("prefill-1", "prefill-0", "--tensor-parallel-size=2", "--block-size=32"),
        it.add("prefill-2", "prefill-0", "--tensor-parallel-size=4"),
        it.add("prefill-whole", "prefill-0", f"--model={WHOLE},prefill_s_per_token=0.0005"),
        it.add("decode-1", "decode-0", "--tensor-parallel-size=2", "--block-size=32"),
        it.add("decode-whole", "decode-0", f"--model={WHOLE},decode_step_s=0.002"),
    )
    await it.wait_joined(4, 3)


async def _burst(it: Suite, first: int, count: int) -> list[tuple[str, str]]:
    """The decode and prefill worker of each of many prompts. All answers are correct."""
    prompts = [
        [*prompt_of(33, 1), *prompt_of(20 + seed, seed)] for seed in range(first, first + count)
    ]
    outcomes: list[Outcome] = await asyncio.gather(*(it.generate(prompt, 8) for prompt in prompts))
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert outcome.token_ids == it.expected(prompt, 8)
        assert outcome.last.timing.attempts == 1
    timings = [outcome.last.timing for outcome in outcomes]
    return [(timing.decode_worker_id, timing.prefill_worker_id) for timing in timings]


async def test_only_compatible_pairs_are_routed(tmp_path: Path) -> None:
    async with suite(tmp_path, sim=SimModel(parse_settings(MODEL)), settings=SETTINGS) as it:
        await _start_others(it)
        pairs: list[tuple[str, str]] = []
        for first in range(100, 400, 20):
            pairs += await _burst(it, first, 20)
            # The fastest worker takes most tasks.
            if len(pairs) >= 80 and len({prefill for _, prefill in pairs}) > len(PREFILLS):
                break
        for decode, prefill in pairs:
            if decode == "decode-whole":
                assert prefill == "prefill-whole"
            else:
                assert prefill in PREFILLS
        assert {decode for decode, _ in pairs} == {*DECODES, "decode-whole"}
        assert {prefill for _, prefill in pairs} == {*PREFILLS, "prefill-whole"}
        # A decode worker without its only partner ranks below all decode workers with a partner.
        assert await it.terminate("prefill-whole") == 0
        await it.wait_joined(3, 3)
        pairs = await _burst(it, 500, 20)
        assert {decode for decode, _ in pairs} <= DECODES
        assert {prefill for _, prefill in pairs} <= PREFILLS
        for name in (*DECODES, *PREFILLS, "decode-whole"):
            await it.wait_empty(name)
