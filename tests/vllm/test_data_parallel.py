"""Data-parallel ranks compute experts together. Each is a worker: two prefill, and two generate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from headrace.inference.v1 import inference_pb2
from tests.suite.deployment import Outcome, Suite, greedy, prompt_of, suite
from tests.vllm.conftest import RunJob, on_services
from tests.vllm.data_parallel import as_ranks
from tests.vllm.pair import STEPS_AHEAD

MODEL = Path("models/tiny-deepseek-v2")
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
ANSWERED_S = 60.0
# A killed process closes its connections at once. The rest is the end of the worker.
LEFT_S = 15.0
SETTINGS = (
    *(("prefill", "dtype", "float32"), ("decode", "dtype", "float32")),
    ("router", "worker_wait_s", "60"),
)
ALONE = [(prompt_of(60 + 90 * number, number), 12) for number in range(3)]
TOGETHER = [(prompt_of(100 + 40 * number, number), 40) for number in range(10, 16)]
AFTERWARDS = (prompt_of(90, 9), 12)
LONG = [(prompt_of(80 + number, number), 150) for number in range(20, 23)]
pytestmark = on_services(MODEL)


def tokens_of(outcomes: list[Outcome]) -> list[list[int]]:
    return [list(outcome.token_ids) for outcome in outcomes]


async def test_ranks_answer_as_one_engine_and_end_together(tmp_path: Path, run_job: RunJob) -> None:
    prompts, counts = zip(*ALONE, *TOGETHER, AFTERWARDS, *LONG, strict=True)
    found = await asyncio.to_thread(
        run_job,
        "tests.vllm.plain:greedy_tokens",
        model=MODEL.name,
        prompts=prompts,
        max_tokens=counts,
        mends_rotation=True,
        engine={"max_model_len": 1024},
    )
    expected = iter(found["tokens"])
    topology: dict[str, Any] = {
        "engine": "vllm",
        "model": str(MODEL),
        "prefill_count": 2,
        "decode_count": 2,
        "settings": SETTINGS,
        # Steps ahead as on GPUs.
        "spawning": partial(as_ranks, more={"prefill": "", "decode": STEPS_AHEAD}),
    }
    start_s = time.monotonic()
    async with suite(tmp_path, **topology) as it:
        print(f"up after {time.monotonic() - start_s:.1f} s")
        # The other rank of each group is idle.
        for prompt, count in ALONE:
            outcome = await it.ask(greedy(prompt, count, REMOTE), ANSWERED_S)
            assert list(outcome.token_ids) == next(expected)
        print(f"alone after {time.monotonic() - start_s:.1f} s")
        requests = [greedy(prompt, count, REMOTE) for prompt, count in TOGETHER]
        outcomes = await asyncio.gather(*(it.ask(one, ANSWERED_S) for one in requests))
        assert tokens_of(outcomes) == [next(expected) for _ in TOGETHER]
        timings = [outcome.last.timing for outcome in outcomes]
        assert {one.prefill_worker_id for one in timings} == {"prefill-0", "prefill-1"}
        assert {one.decode_worker_id for one in timings} == {"decode-0", "decode-1"}
        await survives_a_prefill_rank(it, expected)
        print(f"prefill ended after {time.monotonic() - start_s:.1f} s")
        await survives_a_decode_rank(it, expected)
        print(f"decode ended after {time.monotonic() - start_s:.1f} s")


async def kill_group(it: Suite, name: str, other: str) -> None:
    """Kills a rank, and waits for the end of the other one, which states the cause."""
    survivor = it.child(other)
    it.deployment.supervisor.children.remove(survivor)
    it.kill(name)
    # With this status, a supervisor starts it again.
    assert await asyncio.wait_for(survivor.process.wait(), LEFT_S) == 1
    last = survivor.spec.log_file.read_text().splitlines()[-3:]
    rank = name.rpartition("-")[2]
    assert any(f": data-parallel rank {rank} has ended, and no rank can" in one for one in last), (
        last
    )


async def survives_a_prefill_rank(it: Suite, expected: Iterator[list[int]]) -> None:
    """The group is idle. The other rank ends too, and decode computes the prompts."""
    await kill_group(it, "prefill-1", "prefill-0")
    await it.wait_joined(0, 2)
    prompt, count = AFTERWARDS
    outcome = await it.ask(greedy(prompt, count), ANSWERED_S)
    assert list(outcome.token_ids) == next(expected)


async def survives_a_decode_rank(it: Suite, expected: Iterator[list[int]]) -> None:
    """Streams on both ranks. Both end, and the answers continue when the ranks are back."""
    requests = [greedy(prompt, count, LOCAL) for prompt, count in LONG]
    running = await it.begun(requests, timeout_s=ANSWERED_S, started_tokens=8)
    await it.wait_running("decode-0", "decode-1")
    await kill_group(it, "decode-0", "decode-1")
    await asyncio.gather(it.restart("decode-0"), it.restart("decode-1"))
    outcomes = await asyncio.gather(*running)
    assert tokens_of(outcomes) == [next(expected) for _ in LONG]
    assert all(outcome.last.timing.attempts > 1 for outcome in outcomes)
