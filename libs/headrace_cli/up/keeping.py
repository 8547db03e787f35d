"""`headrace up`: keeps a deployment, starts ended processes again, and follows its planner."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from headrace_cli.client import list_members
from headrace_cli.up.deployment import Deployment, Signals, deployed, ready_text
from headrace_cli.up.restarts import RestartPolicy, Restarts
from headrace_cli.up.scaling import Scaler
from headrace_cli.up.targets import TargetFollower
from headrace_cli.up.topology import Topology, worker_spec
from headrace_common.config import ServiceConfig
from headrace_common.rpc.server import DRAIN_OVERRUN_MAX_S
from headrace_kv.layout.proto import pair_faults_of

# After its last request a process still stops its engine.
_ENGINE_STOP_S: Final = 10.0


async def run_up(
    topology: Topology,
    folder: Path | None,
    console: Console,
    policy: RestartPolicy,
) -> None:
    """Serves until SIGINT or SIGTERM. Raises as Supervisor.check does when a process has ended for good."""
    with Signals() as signals:
        async with deployed(topology, folder, console, signals) as deployment:
            console.print(ready_text(topology, deployment))
            for fault in pair_faults_of(await list_members(deployment.registry)):
                console.print(str(fault), style="yellow", markup=False)
            end = asyncio.create_task(keep(topology, deployment, console, policy))
            stopped = asyncio.create_task(signals.stop.wait())
            try:
                await asyncio.wait({end, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if end.done():
                    end.result()
            finally:
                end.cancel()
                stopped.cancel()
                await asyncio.gather(end, stopped, return_exceptions=True)
            console.print("stopping")


async def keep(
    topology: Topology, deployment: Deployment, console: Console, policy: RestartPolicy
) -> None:
    """Runs until a process ends for good. Then raises as Supervisor.check does."""
    work: list[Coroutine[Any, Any, None]] = [Restarts(deployment.supervisor, console, policy).run()]
    if deployment.planner:
        scaler = new_scaler(topology, deployment, console)
        work.append(TargetFollower(deployment.planner, scaler, console).run())
    tasks = list(map(asyncio.create_task, work))
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def new_scaler(topology: Topology, deployment: Deployment, console: Console) -> Scaler:
    """The scaler of a deployment's workers."""
    addresses = (deployment.registry, deployment.pool)
    return Scaler(
        deployment.supervisor,
        partial(worker_spec, topology, deployment.folder, addresses),
        console,
        partial(drain_timeout_s, topology),
    )


def drain_timeout_s(topology: Topology, service: str) -> float:
    """How long a worker may take from SIGTERM to its end."""
    grace_s = ServiceConfig.model_fields["drain_grace_s"].default
    for target, setting, value in topology.settings:
        if (target, setting) == (service, "drain_grace_s"):
            grace_s = float(value)
    return float(grace_s) + DRAIN_OVERRUN_MAX_S + _ENGINE_STOP_S
