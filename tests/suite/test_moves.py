"""Answers of whole deployments move, by the command and by a drain, over real transports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.console import Console

from headrace.inference.v1 import sampling_pb2
from headrace_cli.commands.workers import drain_worker, move_answer
from headrace_cli.up.keeping import new_scaler
from headrace_cli.up.topology import Topology
from headrace_planner.observation import WorkerCounts
from tests.suite.deployment import Suite, greedy, prompt_of, suite
from tests.suite.test_migration import SEEDED, SLOW_DECODE

TOKENS = 120


@pytest.mark.core
async def test_answers_move_by_the_command_and_all_leave_a_drained_worker(tmp_path: Path) -> None:
    async with suite(tmp_path, decode_count=2, settings=(SLOW_DECODE,)) as it:
        requests = [
            greedy(prompt_of(200 + n, n), TOKENS, request_id=f"r{n}", **(SEEDED if n % 2 else {}))
            for n in range(8)
        ]
        running = await it.begun(requests, 60.0, 8)
        (move,) = (await move_answer(it.deployment.registry, "r1", "")).moves
        assert {move.source_worker_id, move.target_worker_id} == {"decode-0", "decode-1"}
        assert move.payload_bytes
        victim, survivor = await it.busier("decode-0", "decode-1")
        await drain_worker(it.deployment.registry, victim, 60.0, wait=True, console=None)
        outcomes = await asyncio.gather(*running)
        for request, outcome in zip(requests, outcomes, strict=True):
            assert outcome.token_ids == it.expected_of(request)
            assert outcome.last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
            assert outcome.last.timing.attempts == 1
        assert {one.last.timing.decode_worker_id for one in outcomes} == {survivor}
        await it.wait_empty(survivor)


async def by_planner(it: Suite) -> None:
    """As `headrace up` carries out a target with one decode worker less."""
    topology = Topology(engine="sim", port=0, planner=True)
    scaler = new_scaler(topology, it.deployment, Console(quiet=True))
    await scaler.apply(WorkerCounts(prefill=1, decode=1, both=0))


async def by_kubernetes(it: Suite) -> None:
    """What follows the preStop of a pod: it only waits."""
    assert await it.terminate("decode-1") == 0


@pytest.mark.parametrize("remove", [by_planner, by_kubernetes])
async def test_answers_leave_a_worker_that_is_removed(
    tmp_path: Path, remove: Callable[[Suite], Awaitable[None]]
) -> None:
    async with suite(tmp_path, decode_count=2, settings=(SLOW_DECODE,)) as it:
        requests = [greedy(prompt_of(200 + n, n), 2 * TOKENS) for n in range(8)]
        running = await it.begun(requests, 60.0, 8)
        await it.wait_running("decode-1")
        await remove(it)
        outcomes = await asyncio.gather(*running)
        for request, outcome in zip(requests, outcomes, strict=True):
            assert outcome.token_ids == it.expected_of(request)
            assert outcome.last.timing.attempts == 1
        assert {one.last.timing.decode_worker_id for one in outcomes} == {"decode-0"}
        assert any(one.last.usage.receipt.moves for one in outcomes)
        await it.wait_empty("decode-0")
