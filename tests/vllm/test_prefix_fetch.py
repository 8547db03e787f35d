"""A conversation on real engines where prefill fetches what decode generated, while decode workers freeze and end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.inference.v1 import inference_pb2
from headrace_cli.client import reset_prefix_cache
from headrace_common.errors import TransferTimeout
from headrace_common.telemetry import schema
from tests.freezing import freeze, thaw
from tests.suite.deployment import Outcome, Suite, suite
from tests.vllm.conftest import RunJob, on_services
from tests.vllm.pair import BLOCK_TOKENS, STEPS_AHEAD, prompt_of
from tests.vllm.prefix_fetch import FROZEN_TURN, TURNS

MODEL = Path("models/tiny-llama")
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
TURN_TOKENS = 80
ANSWER_TOKENS = 80
LONG_S = 90.0
VLLM: dict[str, Any] = {
    "engine": "vllm",
    "model": str(MODEL),
    "settings": (
        *((role, "dtype", "float32") for role in ("prefill", "decode")),
        *((role, "block_size", str(BLOCK_TOKENS)) for role in ("prefill", "decode")),
        ("prefill", "prefix_fetch_min_tokens", "16"),
        # Longer than any machine pauses.
        ("prefill", "kv_fetch_timeout_s", "30"),
    ),
}
pytestmark = on_services(MODEL)


async def ask(it: Suite, prompt: list[int]) -> Outcome:
    return await it.generate(prompt, ANSWER_TOKENS, placement=REMOTE, timeout_s=LONG_S)


async def fetched_tokens(it: Suite, outcome: Outcome) -> int:
    """The tokens that the prefill task of a request has fetched."""
    trace = await it.trace(outcome.trace_id)
    assert trace.complete
    spans = [one for one in trace.spans if one.name == schema.SPAN_PREFIX_FETCH]
    assert not [one for one in spans if schema.ATTRIBUTE_ERROR_REASON in one.attributes]
    return sum(int(one.attributes[schema.ATTRIBUTE_TOKENS]) for one in spans)


async def ask_and_kill_the_source(it: Suite, prompt: list[int], source: str) -> Outcome:
    """Ends the decode worker with the earlier turns while it sends them to prefill."""
    with it.frozen("prefill-0"):
        running = asyncio.create_task(ask(it, prompt))
        await it.until(source, lambda status: status.active_transfers == 1, LONG_S)
        source_process = psutil.Process(it.child(source).process.pid)
        engine = [process.pid for process in source_process.children(recursive=True)]
        freeze(*engine)
    # Prefill has blocks for what it fetches.
    await it.until("prefill-0", lambda status: status.used_blocks > 0, LONG_S)
    assert not running.done()
    thaw(*engine)
    it.kill(source)
    return await running


async def test_turns_are_fetched_with_equal_tokens_and_a_killed_source_costs_no_answer(
    tmp_path: Path,
) -> None:
    turns: list[tuple[list[int], Outcome]] = []

    def next_prompt() -> list[int]:
        earlier = [*turns[-1][0], *turns[-1][1].token_ids] if turns else []
        return [*earlier, *prompt_of(TURN_TOKENS, len(turns))]

    async with suite(tmp_path, **VLLM, decode_count=2) as it:
        prompt = next_prompt()
        turns.append((prompt, await ask(it, prompt)))
        first = turns[0][1].last.timing.decode_worker_id
        prompt = next_prompt()
        turns.append((prompt, await ask_and_kill_the_source(it, prompt, first)))
        second = turns[1][1].last.timing.decode_worker_id
        assert second not in ("", first)
        prompt = next_prompt()
        turns.append((prompt, await ask(it, prompt)))
        assert turns[-1][1].last.timing.decode_worker_id == second
        # Prefill has the last prompt, and decode has its answer too, in whole blocks.
        assert await fetched_tokens(it, turns[-1][1]) >= ANSWER_TOKENS - BLOCK_TOKENS
        # What it has fetched, it has cached. Whether it fetches more depends on what was faster before.
        prompt = next_prompt()
        turns.append((prompt, await ask(it, prompt)))
        for prompt, outcome in turns:
            await reset_prefix_cache(it.child(second).endpoint, LONG_S)
            alone = await it.generate(prompt, ANSWER_TOKENS, placement=LOCAL, timeout_s=LONG_S)
            assert alone.token_ids == outcome.token_ids
        await it.wait_empty(second, timeout_s=40)


@pytest.mark.parametrize(
    ("model", "prefill_ranks", "decode_ranks", "stages", "both_roles", "engine_args"),
    [
        ("tiny-llama-deep", 1, 1, 1, False, ""),
        ("tiny-llama-deep", 1, 1, 1, False, STEPS_AHEAD),
        ("tiny-llama", 1, 1, 1, True, ""),
        ("tiny-llama", 2, 1, 1, False, ""),
        ("tiny-llama", 1, 1, 2, False, ""),
    ],
)
def test_every_turn_fetches_what_decode_has_and_a_frozen_source_costs_no_answer(
    run_job: RunJob,
    model: str,
    prefill_ranks: int,
    decode_ranks: int,
    stages: int,
    both_roles: bool,
    engine_args: str,
) -> None:
    found = run_job(
        "tests.vllm.prefix_fetch:conversation",
        model=model,
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
        stages=stages,
        both_roles=both_roles,
        engine_args=engine_args,
    )
    assert found["answers"] == found["plain"]
    assert len(found["answers"]) == TURNS
    # All turns but the first.
    assert found["fetched_tokens"] == found["expected_tokens"]
    assert len(found["fetched_tokens"]) == TURNS - 1
    assert min(found["fetched_tokens"]) >= BLOCK_TOKENS
    late = [TransferTimeout.reason if turn == FROZEN_TURN else "" for turn in range(1, TURNS)]
    assert found["reasons"] == late
    # I1: the blocks that the frozen engine may write are held beside those of the prompt.
    assert found["held_blocks"] == found["fetched_tokens"][FROZEN_TURN - 1] // BLOCK_TOKENS
    assert found["left_blocks"] == [0, 0]
