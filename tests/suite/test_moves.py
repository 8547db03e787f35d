"""Answers of whole deployments move, by the command and by a drain, over real transports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_cli.client import list_members
from headrace_cli.commands.workers import drain_worker, move_answer
from headrace_cli.up.keeping import new_scaler
from headrace_cli.up.supervisor import Child
from headrace_cli.up.topology import Topology
from headrace_common.errors import HeadraceError
from headrace_planner.observation import WorkerCounts
from headrace_router.dispatch import moves
from headrace_router.dispatch.attempt import Attempt
from tests.kit.router import Rig
from tests.suite.deployment import Suite, greedy, prompt_of, suite
from tests.suite.test_migration import SEEDED, SLOW_DECODE
from tests.waiting import until

LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
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


STEPS = {
    "asked": (moves._Course, "run"),
    "warm request opened": (moves._Course, "_warmed_by"),
    "prefix asked for": (moves._Course, "_send"),
    "switch opened": (Attempt, "hold"),
    "first token": (Attempt, "move_to"),
    "source cancelled": (Attempt, "lead"),
}
"""Each begins with a call of a method on the router."""


@contextmanager
def at_step(step: str, act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` when a move first gets to a step."""
    owner, name = STEPS[step]
    method, pending = getattr(owner, name), [act]

    def hooked(*args: object, **fields: object) -> Any:
        if pending:
            pending.pop()()
        return method(*args, **fields)

    with mock.patch.object(owner, name, hooked):
        yield
    assert not pending, step


@asynccontextmanager
async def own_router(it: Suite) -> AsyncIterator[Rig]:
    """A router in this process, with the decode workers of a deployment. It may be closed before the end."""
    rig = await Rig(insecure=False).start()

    async def reached() -> bool:
        rig.router.update(await list_members(it.deployment.registry))
        return list(rig.router.workers.table("sim").reachable) == [True, True]

    try:
        await until(reached, 60.0)
        yield rig
    finally:
        await rig.close()


@pytest.mark.parametrize("victim", ["source", "target", "router", "registry"])
async def test_a_process_that_is_killed_at_any_step_of_a_move_costs_no_token(
    tmp_path: Path, victim: str
) -> None:
    async with suite(tmp_path, decode_count=2, settings=(SLOW_DECODE,)) as it:
        for number, step in enumerate(STEPS):
            request = greedy(prompt_of(200, number), TOKENS, LOCAL, "r", **SEEDED)
            async with own_router(it) as rig:
                tokens, killed = await killed_at(step, victim, it, rig, request)
            if victim == "router":
                # As a client does that has another router.
                request.generated.ids.extend(tokens)
                tokens += (await it.ask(request, 60.0)).token_ids
            assert tuple(tokens) == it.expected_of(request), step
            if killed is not None:
                await it.restart_killed(killed)
            for name in ("decode-0", "decode-1"):
                await it.wait_empty(name, 60.0)


async def killed_at(
    step: str, victim: str, it: Suite, rig: Rig, request: inference_pb2.GenerateRequest
) -> tuple[list[int], Child | None]:
    """The tokens of an answer that moves while the victim is killed, and that process."""
    tokens: list[int] = []

    async def read() -> None:
        async for message in rig.stub.Generate(request, timeout=60):
            tokens.extend(message.token_ids)

    reading = asyncio.create_task(read())
    await until(lambda: len(tokens) > 8 or reading.done())
    (attempt,) = rig.router.moves.dispatcher.running.values()
    source = attempt.decode_worker.worker_id
    (target,) = {"decode-0", "decode-1"} - {source}
    name = {"source": source, "target": target, "router": ""}.get(victim, victim)
    killed = it.child(name) if name else None
    refs = [worker.ref for worker in rig.router.workers.table("sim").workers]
    channels = [rig.router.workers.channel_of(ref.incarnation) for ref in refs]

    def kill() -> None:
        if killed is not None:
            it.kill(name)
        else:
            # Its workers see the ends of its links, and its client that of the answer.
            ends.extend(asyncio.ensure_future(one.close()) for one in channels if one)
            reading.cancel()

    ends: list[asyncio.Future[None]] = []
    with at_step(step, kill), suppress(HeadraceError):
        await rig.router.moves.move(attempt, "operator")
    await asyncio.wait([reading, *ends])
    if killed is not None:
        reading.result()
    return tokens, killed
