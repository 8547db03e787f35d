"""PlannerService over gRPC: targets, acknowledgements, and the command that explains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from typer.testing import CliRunner

from headrace.planner.v1 import planner_pb2, planner_pb2_grpc
from headrace_cli.app import app
from headrace_cli.commands.planner import read_explanation
from headrace_common.rpc.server import GrpcServer
from headrace_planner.settings import PlannerSettings
from headrace_planner_service.config import PlannerConfig
from headrace_planner_service.main import SERVICE
from headrace_planner_service.observer import Observer
from headrace_planner_service.service import PlannerServicer, PlanningLoop
from headrace_planner_service.steering import DecisionLog, Steering, TargetBoard
from tests.channels import operator_channel
from tests.unit.planner.samples import interval, sample

CALL_S = 10.0
QUEUED = interval(sample(prefill=1, queued=5))
CALM = interval(sample(prefill=1))


@dataclass(frozen=True)
class Served:
    """A planner without observation, and a stub of it as an operator."""

    steering: Steering
    endpoint: str
    stub: planner_pb2_grpc.PlannerServiceAsyncStub


@pytest.fixture(params=["publish"])
async def planner(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    config = PlannerConfig.model_validate(
        {
            "model": "m",
            "internal_listen": "127.0.0.1:0",
            "mode": request.param,
            "kubernetes_prefill": "statefulset/p",
            "kubernetes_decode": "statefulset/d",
        }
    )
    publishes, board = config.mode != "advise", TargetBoard("p")
    steering = Steering(PlannerSettings(), publishes, 60.0, board, DecisionLog(100), lambda: 0.0)
    observer = cast("Observer", None)
    loop = PlanningLoop(config, observer, steering, lambda entry: None, lambda: None)
    server = GrpcServer(config, [SERVICE])
    planner_pb2_grpc.add_PlannerServiceServicer_to_server(
        PlannerServicer(config, loop, steering), server.server
    )
    endpoint = await server.start()
    async with operator_channel(endpoint) as channel:
        yield Served(steering, endpoint, planner_pb2_grpc.PlannerServiceStub(channel))
    steering.board.close()
    await server.stop(None)


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_a_target_is_watched_and_acknowledged(planner: Served) -> None:
    call = planner.stub.WatchTargets(planner_pb2.WatchTargetsRequest(), timeout=CALL_S)
    reading = asyncio.ensure_future(call.read())
    planner.steering.end_interval(QUEUED)
    response = await reading
    assert isinstance(response, planner_pb2.WatchTargetsResponse)
    assert (response.target.workers.prefill, response.target.workers.decode) == (2, 2)
    assert (response.target.current.prefill, response.target.current.decode) == (1, 2)
    acknowledge = planner_pb2.AcknowledgeTargetRequest
    for _ in range(2):
        await planner.stub.AcknowledgeTarget(
            acknowledge(target_id=response.target.id), timeout=CALL_S
        )
    assert not planner.steering.board.pending
    call.cancel()
    unknown = planner.stub.AcknowledgeTarget(acknowledge(target_id="p-99"), timeout=CALL_S)
    assert await code_of(unknown) is grpc.StatusCode.NOT_FOUND
    for wrong in (acknowledge(), acknowledge(target_id="p-1", failure="x" * 1_001)):
        refused = planner.stub.AcknowledgeTarget(wrong, timeout=CALL_S)
        assert await code_of(refused) is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("planner", ["kubernetes"], indirect=True)
async def test_a_planner_that_scales_takes_no_acknowledgement_of_others(planner: Served) -> None:
    planner.steering.end_interval(QUEUED)
    watched = planner.stub.WatchTargets(planner_pb2.WatchTargetsRequest(), timeout=CALL_S)
    target = (await anext(aiter(watched))).target
    watched.cancel()
    acknowledgement = planner_pb2.AcknowledgeTargetRequest(target_id=target.id)
    call = planner.stub.AcknowledgeTarget(acknowledgement, timeout=CALL_S)
    assert await code_of(call) is grpc.StatusCode.FAILED_PRECONDITION
    assert planner.steering.board.pending
    status, _ = await read_explanation(planner.endpoint, 10)
    assert status.mode == planner_pb2.GetStatusResponse.MODE_KUBERNETES


async def test_the_command_shows_changes_with_their_reasons(planner: Served) -> None:
    planner.steering.end_interval(CALM)
    planner.steering.end_interval(QUEUED)
    arguments = ["planner", "explain", "--planner", planner.endpoint]
    every, changes = [
        await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *more])
        for more in ([], ["--changes"])
    ]
    for result in (every, changes):
        assert result.exit_code == 0, result.output
        words = " ".join(result.stdout.split())
        assert "m, mode publish, a decision every 30 s, target 2 P, 2 D" in words
        assert "published" in words
    assert "keep" in every.stdout
    assert "keep" not in changes.stdout
