"""A cancelled request ends at every stage long before its answer would, and does not affect other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from headrace.inference.v1 import inference_pb2
from headrace.worker.v1 import worker_pb2
from tests.suite.deployment import Outcome, Suite, greedy, prompt_of, suite

# A cancellation takes effect within a second. A machine that is ten times slower meets this, and each step without
# the cancellation takes longer.
EFFECT_S = 10.0
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
# One step of prefill takes 0.3 s and cannot be interrupted. A whole prompt takes 20 s.
SETTINGS = (
    ("prefill", "model", "sim:prefill_s_per_token=0.01"),
    ("prefill", "max_num_batched_tokens", "32"),
    ("prefill", "max_num_seqs", "1"),
    ("decode", "model", "sim:decode_step_s=0.02,prefill_s_per_token=0.01"),
    ("decode", "max_num_batched_tokens", "32"),
)

Status = worker_pb2.WatchStatusResponse
Asked = list[asyncio.Task[Outcome]]


async def until_empty(it: Suite, name: str) -> None:
    """Waits until a worker holds nothing."""

    def holds_nothing(status: Status) -> bool:
        # Blocks that prefill may still write to are in quarantine.
        return not (
            status.running_requests
            or status.waiting_requests
            or status.reserved_blocks
            or status.active_transfers
        )

    await it.until(name, holds_nothing, EFFECT_S)


def one_runs(status: Status) -> bool:
    return status.running_requests == 1


def asked(it: Suite, seed: int, placement: inference_pb2.PrefillPlacement.ValueType) -> Asked:
    prompt = prompt_of(2_000, seed)
    return [asyncio.create_task(it.generate(prompt, 4, placement=placement, timeout_s=60))]


async def in_the_queue(it: Suite) -> Asked:
    """The only slot of the prefill worker is taken. The second prompt waits in the router."""
    both = asked(it, 0, REMOTE) + asked(it, 1, REMOTE)
    await it.until("decode-0", lambda status: status.active_transfers == 2)
    await it.until("prefill-0", one_runs)
    return both


async def in_prefill(it: Suite) -> Asked:
    one = asked(it, 3, REMOTE)
    await it.until("prefill-0", one_runs)
    return one


async def in_decode(it: Suite) -> Asked:
    return await it.begun([greedy(prompt_of(40, 4), 2_000, REMOTE)], timeout_s=60)


async def in_local_prefill(it: Suite) -> Asked:
    one = asked(it, 5, LOCAL)
    await it.until("decode-0", one_runs)
    return one


@pytest.mark.core
async def test_a_cancellation_takes_effect_at_every_stage(tmp_path: Path) -> None:
    stages: tuple[Callable[[Suite], Awaitable[Asked]], ...] = (
        in_the_queue,
        in_prefill,
        in_decode,
        in_local_prefill,
    )
    async with suite(tmp_path, settings=SETTINGS) as it:
        for stage in stages:
            for task in reversed(await stage(it)):
                task.cancel()
                await asyncio.wait({task})
                assert task.cancelled()
            for name in ("decode-0", "prefill-0"):
                await until_empty(it, name)
        # The workers have room again.
        prompt = prompt_of(40, 9)
        outcome = await it.generate(prompt, 4, placement=REMOTE)
        assert outcome.token_ids == it.expected(prompt, 4)
