"""Workers of both roles on real vLLM engines: each answer equals that of an undisturbed worker that computes alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2
from headrace_cli.commands.policy import set_policy
from headrace_cli.up.supervisor import ChildProcess, Spawn
from headrace_cli.up.topology import ProcessSpec
from headrace_common.durations import duration_from_seconds
from tests.suite.deployment import greedy, suite
from tests.vllm.conftest import on_services
from tests.vllm.pair import STEPS_AHEAD
from tests.vllm.test_services import SEEDED, assert_same, prompt_of
from tests.waiting import until

MODEL = Path("models/tiny-llama")
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
ANY = inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED
BOTH: dict[str, Any] = {
    "engine": "vllm",
    "model": str(MODEL),
    "prefill_count": 0,
    "decode_count": 0,
    "worker_count": 2,
    "settings": (
        ("worker", "dtype", "float32"),
        ("worker", "block_size", "32"),
        ("worker", "max_num_batched_tokens", "256"),
    ),
}
pytestmark = on_services(MODEL)


def requests(
    placement: inference_pb2.PrefillPlacement.ValueType, tpot_s: float = 0.0
) -> Iterator[inference_pb2.GenerateRequest]:
    """Prompts around the sizes of blocks and steps, half of them with sampling."""
    for number, length in enumerate((2, 31, 33, 256, 257, 700)):
        options = SEEDED if number % 2 else {}
        request = greedy(prompt_of(length, number), 12, placement, logprobs=1, **options)
        # Else the second way would find the first one's blocks.
        request.cache_salt = f"{placement} {tpot_s}"
        if tpot_s:
            request.tpot_target.CopyFrom(duration_from_seconds(tpot_s))
        yield request


@pytest.mark.parametrize("engine_args", [pytest.param("", marks=pytest.mark.core), STEPS_AHEAD])
async def test_answers_are_the_same_wherever_prompts_are_computed(
    tmp_path: Path, engine_args: str
) -> None:
    settings = (*BOTH["settings"], ("worker", "engine_args", engine_args))
    async with suite(tmp_path, **BOTH | {"settings": settings}) as it:
        alone = [await it.ask(request, 90) for request in requests(LOCAL)]
        handed_over = [await it.ask(request, 90) for request in requests(REMOTE)]
        ways = [requests(REMOTE, 0.02), requests(ANY, 0.02), requests(ANY, 5.0)]
        together = await asyncio.gather(*(it.ask(one, 90) for way in ways for one in way))
        for outcome, plain in zip((*handed_over, *together), 4 * alone, strict=True):
            assert_same(outcome, plain)
        for outcome in handed_over:
            timing = outcome.last.timing
            assert {timing.prefill_worker_id, timing.decode_worker_id} == {"worker-0", "worker-1"}
        for worker in ("worker-0", "worker-1"):
            await it.wait_empty(worker, timeout_s=20)


def with_two_ranks(spawn: Spawn) -> Spawn:
    """Gives worker-1 two ranks."""

    async def start(spec: ProcessSpec) -> ChildProcess:
        if spec.name == "worker-1":
            one, two = (f"--tensor-parallel-size={ranks}" for ranks in (1, 2))
            assert one in spec.arguments
            arguments = tuple(two if flag == one else flag for flag in spec.arguments)
            spec = replace(spec, arguments=arguments)
        return await spawn(spec)

    return start


async def test_workers_with_unlike_ranks_hand_over_in_both_directions(tmp_path: Path) -> None:
    async with suite(tmp_path, spawning=with_two_ranks, **BOTH) as it:
        plain = [await it.ask(request, 90) for request in requests(LOCAL)]
        for prefill, decode in (("worker-0", "worker-1"), ("worker-1", "worker-0")):
            roles = (f"worker_roles.{prefill}=prefill", f"worker_roles.{decode}=decode")
            await set_policy(it.deployment.registry, roles)

            async def goes_there(way: tuple[str, str] = (prefill, decode)) -> bool:
                timing = (await it.ask(greedy(prompt_of(40, 99), 1, REMOTE), 90)).last.timing
                return (timing.prefill_worker_id, timing.decode_worker_id) == way

            await until(goes_there, 20.0, "the roles")
            handed_over = [it.ask(request, 90) for request in requests(REMOTE, 5.0)]
            for outcome, alone in zip(await asyncio.gather(*handed_over), plain, strict=True):
                assert_same(outcome, alone)
                assert outcome.last.timing.decode_worker_id == decode
        for worker in ("worker-0", "worker-1"):
            await it.wait_empty(worker, timeout_s=20)
