"""Sim workers inside the test process, which join and leave one by one."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import Any

from headrace_common.identity import new_incarnation
from headrace_common.rpc.server import Drainer, GrpcServer
from headrace_decode.config import DecodeConfig
from headrace_decode.main import DecodeServer
from headrace_engine.factory import build_engine, shared_transport
from headrace_engine.interface import Engine
from headrace_engine.worker.config import engine_config
from headrace_engine.worker.host import HostedWorker, Role, WorkerHost
from headrace_engine.worker.process import RegistryDescriptors
from headrace_engine.worker.serve import serve_worker
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.send.sender import SenderThread
from headrace_prefill.config import PrefillConfig
from headrace_prefill.main import PrefillServer
from tests.suite.deployment import START_S


class _Host(WorkerHost):
    """Has no stop signal of its own. The test stops each worker."""

    def __init__(self, role: Role, config: PrefillConfig | DecodeConfig) -> None:
        super().__init__(role, config)
        self.servers: dict[str, GrpcServer] = {}

    async def serve(self, server: GrpcServer, on_drain: Drainer) -> None:
        self.servers[server.port_line] = server
        await server.serve_until_stopped(on_drain)


@dataclass(frozen=True, slots=True)
class Guest:
    """A worker of this process."""

    worker_id: str
    endpoint: str
    server: GrpcServer
    task: asyncio.Task[None]

    async def leave(self) -> None:
        """Drains as on SIGTERM: takes no new work and finishes its work."""
        self.server.request_stop()
        await asyncio.wait_for(asyncio.shield(self.task), START_S)

    async def die(self) -> None:
        """Cuts off all work at once."""
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=START_S)
        assert self.task.done()


class Fleet:
    """The workers of one role in this process. Must be closed."""

    def __init__(self, role: Role, registry: str) -> None:
        self._role = role
        self._numbers = itertools.count()
        self._base = self._config(f"more-{role}", registry)
        self._host = _Host(role, self._base)
        self._descriptors = RegistryDescriptors()
        self._descriptors.connect(self._host.descriptors)
        self._sender_thread = SenderThread("kv-sender")
        self._transport = shared_transport(
            engine_config(self._base, role=role, ref=WorkerRef("", ""))
        )
        # Their memory stays registered.
        self._engines: list[Engine] = []
        self.guests: list[Guest] = []

    def _config(self, worker_id: str, registry: str) -> PrefillConfig | DecodeConfig:
        kind: type[PrefillConfig | DecodeConfig]
        kind = PrefillConfig if self._role == "prefill" else DecodeConfig
        settings = {
            "worker_id": worker_id,
            "registry": registry,
            "engine": "sim",
            "served_model": "sim",
            "kv_cache_gib": 0.002,
            "drain_grace_s": 10.0,
        }
        return kind.model_validate(settings)

    async def add(self) -> Guest:
        """Adds a worker and returns once it has joined."""
        config = self._base.model_copy(
            update={"worker_id": f"{self._base.worker_id}-{next(self._numbers)}"}
        )
        known = set(self._host.servers)
        task = asyncio.create_task(self._run(config))
        give_up = time.monotonic() + START_S
        while not (fresh := set(self._host.servers) - known):
            assert not task.done(), task.exception()
            assert time.monotonic() < give_up
            await asyncio.sleep(0.01)
        endpoint = fresh.pop()
        guest = Guest(config.worker_id, endpoint, self._host.servers[endpoint], task)
        self.guests.append(guest)
        return guest

    async def _run(self, config: Any) -> None:
        ref = WorkerRef(config.worker_id, new_incarnation())
        engine = build_engine(
            engine_config(config, role=self._role, ref=ref),
            self._descriptors,
            self._sender_thread,
            transport=self._transport,
        )
        self._engines.append(engine)
        try:
            await engine.start()
            hosted = HostedWorker(config, ref, engine, time.time_ns())
            build: Any = PrefillServer if self._role == "prefill" else DecodeServer
            await serve_worker(self._host, hosted, build)
        finally:
            await engine.close()

    async def close(self) -> None:
        """Ends the remaining workers."""
        await asyncio.gather(*(guest.leave() for guest in self.guests if not guest.task.done()))
        await self._host.close()
