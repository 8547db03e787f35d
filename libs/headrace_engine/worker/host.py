"""The workers of one process, and what they share: one, or of engine sim as many as wanted."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from headrace.registry.v1 import registry_pb2
from headrace_common.identity import new_incarnation
from headrace_common.registry.descriptors import DescriptorCache
from headrace_common.registry.view import RegistryView
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import Drainer, GrpcServer, stop_signals, write_port_file
from headrace_common.telemetry.setup import init_telemetry
from headrace_engine.factory import build_engine
from headrace_engine.interface import Engine
from headrace_engine.worker.config import WorkerConfig, engine_config, worker_configs
from headrace_engine.worker.metrics import WorkerMetrics
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.send.context import DescriptorSource
from headrace_kv.send.thread import SenderThread

RouterListener = Callable[[list[registry_pb2.Member]], None]
Config = TypeVar("Config", bound=WorkerConfig)
Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class HostedWorker(Generic[Config]):
    """A worker whose engine has started."""

    config: Config
    ref: WorkerRef
    engine: Engine
    start_unix_ns: int


class WorkerHost:
    """What the workers of a process share: its traces and metrics, its way to the registry, and its end."""

    def __init__(self, role: Role, config: WorkerConfig) -> None:
        self.telemetry = init_telemetry(role, config.worker_id, config)
        self.metrics = WorkerMetrics(self.telemetry.metrics.meter)
        self.registry = open_channel(config.registry, config)
        self.descriptors = DescriptorCache(self.registry)
        self._config = config
        self._sends = role == "prefill"
        self._view = RegistryView(self.registry, on_change=self._note_change)
        self._view_start: asyncio.Task[None] | None = None
        self._listeners: list[RouterListener] = []
        self._servers: dict[str, GrpcServer] = {}
        self._ends = contextlib.ExitStack()

    async def follow_routers(self, listener: RouterListener | None) -> None:
        """From now on tells `listener` which routers are live; at once, if they are known.

        Raises RegistryUnavailable.
        """
        if self._view_start is None:
            start = self._view.start(self._config.registration_timeout_s)
            self._view_start = asyncio.create_task(start)
        await asyncio.shield(self._view_start)
        if listener is not None:
            self._listeners.append(listener)
            listener(list(self._view.of_role(registry_pb2.Member.ROLE_ROUTER)))

    def unfollow_routers(self, listener: RouterListener | None) -> None:
        """Tells `listener` nothing more, if it was told anything."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def serve(self, endpoint: str, server: GrpcServer, on_drain: Drainer) -> None:
        """Serves a worker until it is drained or a signal comes, heard once all workers of the process serve."""
        self._servers[endpoint] = server
        if len(self._servers) == self._config.workers_per_process:
            if self._config.workers_per_process > 1 and self._config.port_file:
                write_port_file(self._config.port_file, "\n".join(self._servers))
            self._ends.enter_context(stop_signals(self._request_stop))
        await server.serve_until_stopped(on_drain)

    async def close(self) -> None:
        """Ends everything that is shared."""
        self._ends.close()
        await self.metrics.close()
        if self._view_start is not None:
            self._view_start.cancel()
            await asyncio.gather(self._view_start, return_exceptions=True)
        await self._view.stop()
        await self.descriptors.close()
        await self.registry.close()
        await asyncio.to_thread(self.telemetry.shutdown)

    def _request_stop(self) -> None:
        for server in self._servers.values():
            server.request_stop()

    def _note_change(self, view: RegistryView) -> None:
        routers = view.of_role(registry_pb2.Member.ROLE_ROUTER)
        self.telemetry.set_collectors([router.endpoint for router in routers])
        for listener in self._listeners:
            listener(list(routers))
        if self._sends:
            decodes = view.of_role(registry_pb2.Member.ROLE_DECODE)
            self.descriptors.prefetch([(one.worker_id, one.incarnation) for one in decodes])


async def host_workers(
    role: Role,
    config: Config,
    descriptors: DescriptorSource,
    serve: Callable[[WorkerHost, HostedWorker[Config]], Coroutine[Any, Any, None]],
) -> None:
    """Starts the engines, then everything that talks, and has `serve` run each worker until a
    signal comes.

    The engines come first: they may start processes of their own, which must not inherit gRPC's
    threads.
    """
    if config.workers_per_process > 1:
        _lift_file_limit()
    sender_thread = SenderThread("kv-sender") if config.workers_per_process > 1 else None
    workers: list[HostedWorker[Config]] = []
    try:
        for own in worker_configs(config):
            start_unix_ns = time.time_ns()
            ref = WorkerRef(own.worker_id, new_incarnation())
            engine = build_engine(
                engine_config(own, role=role, ref=ref), descriptors, sender_thread
            )
            workers.append(HostedWorker(own, ref, engine, start_unix_ns))
            await engine.start()
        host = WorkerHost(role, config)
        try:
            await _run_together([serve(host, worker) for worker in workers])
        finally:
            await host.close()
    finally:
        await asyncio.gather(*(worker.engine.close() for worker in workers))


async def _run_together(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Returns when all have; the first failure ends the others and is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _lift_file_limit() -> None:
    """Each worker has a socket to listen on, and one for each caller."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
