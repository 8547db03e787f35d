"""Real decode engines that compute prompts fetch from each other. Each answer equals that of one engine alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_cli.commands.policy import set_policy
from tests.suite.deployment import greedy, suite
from tests.vllm.conftest import on_services
from tests.vllm.test_services import LOCAL, assert_same, prompt_of

MODEL = Path("models/tiny-llama")
TURNS_MAX = 20
ANSWER_TOKENS = 40
pytestmark = on_services(MODEL)


@pytest.mark.parametrize("engine_args", ["", "--async-scheduling"], ids=["plain", "steps ahead"])
async def test_the_worker_of_the_next_turn_fetches_from_that_of_the_last_one(
    tmp_path: Path, engine_args: str
) -> None:
    settings = (
        ("decode", "dtype", "float32"),
        ("decode", "engine_args", f"--enforce-eager {engine_args}"),
        ("router", "prefix_fetch_gain", "0"),
    )
    topology: dict[str, Any] = {"engine": "vllm", "model": str(MODEL), "settings": settings}
    async with suite(tmp_path, **topology, prefill_count=0, decode_count=2) as it:
        # Either worker is drawn for each turn.
        await set_policy(it.deployment.registry, ["temperature=10"])
        prompt: list[int] = []
        pairs: set[tuple[str, str]] = set()
        for turn in range(TURNS_MAX):
            prompt += prompt_of(60, turn)
            request = greedy(prompt, ANSWER_TOKENS, LOCAL, f"r{turn}", logprobs=1)
            answer = await it.ask(request, 60)
            for link in answer.last.usage.receipt.links:
                assert link.payload_bytes > 0
                pairs.add((link.source_worker_id, link.destination_worker_id))
            # Nothing is cached for it.
            request.cache_salt = f"{turn}"
            assert_same(answer, await it.ask(request, 60))
            prompt += answer.token_ids
            if len(pairs) == 2:
                break
        assert pairs == {("decode-0", "decode-1"), ("decode-1", "decode-0")}
        for name in ("decode-0", "decode-1"):
            await it.wait_empty(name, timeout_s=20)
