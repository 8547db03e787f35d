"""Starts the planner: settings, observation, loop, server."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NoReturn

from headrace.planner.v1 import planner_pb2, planner_pb2_grpc
from headrace_common.access.roles import REGISTRY_AUDIENCE
from headrace_common.deadlines import Deadline
from headrace_common.identity import new_incarnation
from headrace_common.logs import setup_logging
from headrace_common.process.run import run_service
from headrace_common.process.settings import load_config, redacted
from headrace_common.registry.view import RegistryView
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import GrpcServer
from headrace_common.tasks import end_task, run_forever
from headrace_common.telemetry.metrics.listener import metrics_served
from headrace_common.telemetry.setup import init_telemetry
from headrace_planner.settings import read_settings
from headrace_planner_service.config import PlannerConfig
from headrace_planner_service.kubernetes_connector import KubernetesConnector, open_scaler
from headrace_planner_service.observer import Observer
from headrace_planner_service.service import PlannerServicer, PlanningLoop
from headrace_planner_service.steering import (
    DecisionLog,
    PlannerMetrics,
    Steering,
    TargetBoard,
)

_LOG = logging.getLogger(__name__)

PROG = "headrace-planner"
_DECISIONS_MAX = 1_000
SERVICE = planner_pb2.DESCRIPTOR.services_by_name["PlannerService"].full_name


def main() -> NoReturn:
    """Entry point of the console script."""
    run_service(PROG, serve)


async def serve() -> None:
    """Serves until a signal. Raises ConfigError or RegistryUnavailable when it cannot start as configured."""
    config = load_config(PlannerConfig, None, prog=PROG, env_prefix="HEADRACE_PLANNER_")
    setup_logging(config.log_level, "planner", config.planner_id, config.log_format)
    board = TargetBoard(new_incarnation())
    steering = Steering(
        read_settings(Path(config.settings_file) if config.settings_file else None),
        config.mode != "advise",
        # In Kubernetes, the connector ends each change in time.
        math.inf if config.mode == "kubernetes" else config.change_timeout_s,
        board,
        DecisionLog(_DECISIONS_MAX),
        time.monotonic,
    )
    async with AsyncExitStack() as stack:
        telemetry = init_telemetry("planner", config.planner_id, config)
        stack.push_async_callback(asyncio.to_thread, telemetry.shutdown)
        await stack.enter_async_context(metrics_served(config, telemetry.metrics))
        registry = open_channel(config.registry, config, REGISTRY_AUDIENCE)
        stack.push_async_callback(registry.close)
        observer = Observer(config.model, lambda endpoint: open_channel(endpoint, config))
        stack.push_async_callback(observer.close)
        members = RegistryView(
            registry, on_change=lambda view: _update(observer, view), without_layouts=True
        )
        stack.push_async_callback(members.stop)
        await members.start()
        tasks: list[asyncio.Task[None]] = []
        if config.mode == "kubernetes":
            scaler = await stack.enter_async_context(open_scaler(config))
            connector = KubernetesConnector(board, scaler, steering.acknowledge)
            tasks.append(run_forever(connector.run, "kubernetes"))
            stack.push_async_callback(end_task, tasks[-1])
        metrics = PlannerMetrics(telemetry.metrics.store)
        loop = PlanningLoop(config, observer, steering, metrics.count_decision, metrics.count_miss)
        server = GrpcServer(config, [SERVICE])
        planner_pb2_grpc.add_PlannerServiceServicer_to_server(
            PlannerServicer(config, loop, steering), server.server
        )
        stack.push_async_callback(server.stop, None)
        endpoint = await server.start()
        tasks.append(run_forever(loop.run, "planning"))
        stack.push_async_callback(end_task, tasks[-1])
        _LOG.info("%s serves on %s with %s", config.planner_id, endpoint, redacted(config))
        await server.serve_until_signal(lambda deadline: _drain(board, tasks, deadline))


def _update(observer: Observer, view: RegistryView) -> None:
    observer.update(view.members.values(), current=view.connected)


async def _drain(
    board: TargetBoard, tasks: Collection[asyncio.Task[None]], deadline: Deadline
) -> None:
    """Decides and changes nothing more, and ends the watches of targets."""
    for task in tasks:
        await end_task(task)
    board.close()
