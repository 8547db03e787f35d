"""The workers of one process share telemetry, the connection to the registry, and the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import time_model_pb2
from headrace_common.access.roles import REGISTRY_AUDIENCE
from headrace_common.errors import StaleIncarnation
from headrace_common.registry.descriptors import DescriptorCache
from headrace_common.registry.duties import COMPUTE_PROMPTS, GENERATE, WORKERS
from headrace_common.registry.membership import LeaseRenewals
from headrace_common.registry.view import RegistryView
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import (
    Drainer,
    GrpcServer,
    notify_ready,
    stop_signals,
    write_port_file,
)
from headrace_common.telemetry.setup import init_telemetry
from headrace_common.time_model.model import HandoverLearner, TimeModel
from headrace_engine.config import WorkerRole
from headrace_engine.interface import Engine
from headrace_engine.proto import device_time_to_proto
from headrace_engine.worker.adapters import WorkerAdapters
from headrace_engine.worker.config import REGISTRATION_TIMEOUT_S, WorkerConfig
from headrace_engine.worker.metrics import WorkerMetrics
from headrace_kv.layout import WorkerRef

RouterListener = Callable[[list[registry_pb2.Member]], None]

_RENEWALS_PER_TTL = 3
# Workers need the members with which they hand KV over.
_PEER_ROLES: Final[Mapping[WorkerRole, tuple[registry_pb2.Member.Role.ValueType, ...]]] = {
    "prefill": GENERATE,
    "decode": COMPUTE_PROMPTS,
    "both": WORKERS,
}


_Config_co = TypeVar("_Config_co", bound=WorkerConfig, covariant=True)


@dataclass(frozen=True, slots=True)
class HostedWorker(Generic[_Config_co]):
    """A worker, its started engine, the adapters that it announces, and the hand-overs that it learns from."""

    config: _Config_co
    ref: WorkerRef
    engine: Engine
    start_unix_ns: int
    adapters: WorkerAdapters
    handovers: HandoverLearner = field(default_factory=HandoverLearner)

    def times(self) -> TimeModel:
        """What the worker has learned of its times, without links."""
        return TimeModel(self.engine.step_times, self.handovers.times)

    def device_time(self) -> time_model_pb2.DeviceTime:
        """What the time of its devices was spent on."""
        return device_time_to_proto(
            self.engine.steps.engine_time, len(self.engine.descriptor.ranks)
        )


class WorkerHost:
    """Owns the shared parts of a process of workers."""

    def __init__(self, role: WorkerRole, config: WorkerConfig) -> None:
        self.telemetry = init_telemetry(role, config.worker_id, config)
        self.metrics = WorkerMetrics(self.telemetry.metrics)
        self.registry = open_channel(config.registry, config, REGISTRY_AUDIENCE)
        self.descriptors = DescriptorCache(self.registry)
        self.renewals: LeaseRenewals | None = None
        if config.workers_per_process > 1:
            self.renewals = LeaseRenewals(self.registry, config.member_ttl_s / _RENEWALS_PER_TTL)
        self._config = config
        self._sends = role != "decode"
        self._view = RegistryView(
            self.registry,
            on_change=self._members_changed,
            roles=(registry_pb2.Member.ROLE_ROUTER, *_PEER_ROLES[role]),
            without_layouts=True,
        )
        self._view_start: asyncio.Task[None] | None = None
        self._listeners: list[RouterListener] = []
        self._servers: dict[str, GrpcServer] = {}
        self._signals = contextlib.ExitStack()

    @property
    def members(self) -> RegistryView:
        """Routers, the workers with which KV is handed over, without their layouts, and the policy.

        Valid once `follow_routers` has returned.
        """
        return self._view

    def prefill_endpoint(self, ref: WorkerRef) -> str:
        """The internal host:port of a prefill worker. Raises StaleIncarnation unless that incarnation is registered."""
        member = self._view.members.get(ref.worker_id)
        if (
            member is None
            or member.role not in COMPUTE_PROMPTS
            or member.incarnation != ref.incarnation
        ):
            raise StaleIncarnation(
                f"{ref} is not registered as a prefill worker",
                metadata={"worker_id": ref.worker_id, "incarnation": ref.incarnation},
            )
        return member.endpoint

    async def follow_routers(self, listener: RouterListener | None) -> None:
        """Calls `listener` with the live routers, now and on every change.

        Raises RegistryUnavailable.
        """
        if self._view_start is None:
            start = self._view.start(REGISTRATION_TIMEOUT_S)
            self._view_start = asyncio.create_task(start)
        await asyncio.shield(self._view_start)
        if listener is not None:
            self._listeners.append(listener)
            listener(list(self._view.of_role(registry_pb2.Member.ROLE_ROUTER)))

    def unfollow_routers(self, listener: RouterListener | None) -> None:
        """Calls `listener` no more. An unknown listener is ignored."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def serve(self, server: GrpcServer, on_drain: Drainer) -> None:
        """Serves a worker until it is drained or the process gets a signal.

        Signals are handled once all workers of the process serve.
        """
        self._servers[server.port_line] = server
        if len(self._servers) == self._config.workers_per_process:
            if self._config.port_file:
                write_port_file(self._config.port_file, "\n".join(self._servers))
            self._signals.enter_context(stop_signals(self._request_stop))
            notify_ready()
        await server.serve_until_stopped(on_drain)

    async def close(self) -> None:
        """Ends everything that is shared."""
        self._signals.close()
        await self.metrics.close()
        if self._view_start is not None:
            self._view_start.cancel()
            await asyncio.gather(self._view_start, return_exceptions=True)
        await self._view.stop()
        await self.descriptors.close()
        if self.renewals is not None:
            await self.renewals.close()
        await self.registry.close()
        await asyncio.to_thread(self.telemetry.shutdown)

    def _request_stop(self) -> None:
        for server in self._servers.values():
            server.request_stop()

    def _members_changed(self, view: RegistryView) -> None:
        routers = view.of_role(registry_pb2.Member.ROLE_ROUTER)
        self.telemetry.set_collectors([router.endpoint for router in routers])
        for listener in self._listeners:
            listener(list(routers))
        if self._sends:
            decodes = view.of_role(*GENERATE)
            self.descriptors.prefetch([(one.worker_id, one.incarnation) for one in decodes])
