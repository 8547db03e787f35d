"""Serves and registers one worker, from the start of its gRPC server to the end of its drain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import ClassVar

import grpc.aio

from headrace.inference.v1.adapter_pb2 import RuntimeAdapter
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.registry.adapters import (
    Adapter,
    adapter_to_proto,
)
from headrace_common.registry.membership import Membership
from headrace_common.rpc.channel import MESSAGE_BYTES_MAX
from headrace_common.rpc.server import GrpcServer
from headrace_common.tickets import TicketKeys
from headrace_engine.worker.config import (
    REGISTRATION_TIMEOUT_S,
    Config,
    worker_member,
)
from headrace_engine.worker.host import HostedWorker, RouterListener, WorkerHost
from headrace_engine.worker.metrics import Reporting, Status
from headrace_engine.worker.status import StatusSignal, WatchedStatus, WorkerStatusServicer
from headrace_kv.layout import KvDescriptor, descriptor_to_proto
from headrace_kv.receive.receiver import Receiver

WORKER_SERVICE = "headrace.worker.v1.WorkerService"


class RoleServer(ABC):
    """What one worker serves beside WorkerService, and how it drains; each role has its own.

    `services` are the full names of the gRPC services. `reserves_blocks`: whether its KV blocks are
    reserved by requests, rather than used as a cache only. `descriptor` is registered, if there is
    one. `on_routers` is called with the live routers. `ticket_keys` gets the keys that routers send
    with WatchStatus. `status_signal` is notified when an idle worker begins something.
    `message_bytes_max` is for the server. `incoming` has the transfers into its blocks, for metrics.
    """

    role: ClassVar[registry_pb2.Member.Role.ValueType]
    services: tuple[str, ...] = ()
    reserves_blocks: ClassVar[bool] = False
    incoming: Receiver | None = None
    descriptor: KvDescriptor | None = None
    on_routers: RouterListener | None = None
    ticket_keys: TicketKeys | None = None
    status_signal: StatusSignal
    message_bytes_max: int = MESSAGE_BYTES_MAX

    @abstractmethod
    def add_servicers(self, server: grpc.aio.Server) -> None:
        """Adds the servicers of `services`."""

    async def start_http(self) -> str:
        """Listens for HTTP. Returns the host:port at which gateways reach it, or nothing without HTTP."""
        return ""

    def set_prefix_hash_key(self, key: int) -> None:  # noqa: B027 - most need none
        """Called with the deployment's key for hashes of prefixes, when the worker has registered."""

    @abstractmethod
    def status(self) -> worker_pb2.WatchStatusResponse:
        """The state that WatchStatus reports now."""

    @abstractmethod
    def start_drain(self, deadline: Deadline) -> None:
        """Called first when the worker drains, before it leaves the registry."""

    @abstractmethod
    async def finish_drain(self, deadline: Deadline) -> None:
        """Called after the worker has left the registry. Returns when all its work has ended."""

    @abstractmethod
    async def close(self) -> None:
        """Called at the end, drained or not, before the engine is closed."""


BuildServer = Callable[[WorkerHost, HostedWorker[Config]], RoleServer]
"""Makes the server of a worker."""


async def serve_worker(
    host: WorkerHost, hosted: HostedWorker[Config], build: BuildServer[Config]
) -> None:
    """Registers and serves one worker until `host` stops or drains it."""
    config, engine = hosted.config, hosted.engine
    worker = build(host, hosted)
    status = WatchedStatus(worker.status, engine.steps).read
    services = (*worker.services, WORKER_SERVICE)
    server = GrpcServer(config, services, message_bytes_max=worker.message_bytes_max)
    worker.add_servicers(server.server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(
        WorkerStatusServicer(
            status,
            engine.prefix_events,
            worker.status_signal,
            engine.reset_prefix_cache,
            server.request_drain,
            hosted.adapters.change,
            hosted.times,
            hosted.device_time,
            worker.ticket_keys,
        ),
        server.server,
    )
    try:
        await _serve(host, hosted, worker, server, status)
    finally:
        # gRPC would stop it later, when the event loop is closed.
        await server.stop(None)
        await worker.close()


async def _serve(
    host: WorkerHost,
    hosted: HostedWorker[Config],
    worker: RoleServer,
    server: GrpcServer,
    status: Status,
) -> None:
    """Listens, registers and serves, until `host` stops or drains the worker."""
    config, ref, engine = hosted.config, hosted.ref, hosted.engine
    endpoint = await server.start()
    server.set_serving(False)
    member = worker_member(
        config,
        role=worker.role,
        ref=ref,
        endpoint=endpoint,
        http_endpoint=await worker.start_http(),
        engine=engine,
        adapters=hosted.adapters.announced,
        start_unix_ns=hosted.start_unix_ns,
    )
    prefills = worker.role == registry_pb2.Member.ROLE_PREFILL
    member.computes_beside = prefills and engine.computes_beside and worker.incoming is not None
    descriptor = worker.descriptor
    membership = Membership(
        host.registry,
        member,
        ttl_s=config.member_ttl_s,
        descriptor=None if descriptor is None else descriptor_to_proto(descriptor),
        renewals=host.renewals,
    )

    async def announce(adapters: Sequence[Adapter], loaded_later: Sequence[RuntimeAdapter]) -> None:
        announced = deepcopy(member)
        del announced.adapters[:]
        announced.adapters.extend(map(adapter_to_proto, adapters))
        announced.runtime_adapters.extend(loaded_later)
        await membership.replace(announced, REGISTRATION_TIMEOUT_S)

    async def leave() -> None:
        host.unfollow_routers(worker.on_routers)
        await membership.stop()

    async def drain(deadline: Deadline) -> None:
        worker.start_drain(deadline)
        worker.status_signal.notify()
        await leave()
        await worker.finish_drain(deadline)

    try:
        await membership.start(REGISTRATION_TIMEOUT_S)
        engine.prefix_events.set_hash_key(membership.prefix_hash_key, member.model)
        await host.follow_routers(worker.on_routers)
        worker.set_prefix_hash_key(membership.prefix_hash_key)
        await hosted.adapters.join(host.registry, member.model, announce)
        server.set_serving(True)
        reporting = Reporting(
            status=status,
            reserves_blocks=worker.reserves_blocks,
            incoming=worker.incoming,
            tier_loads=engine.tier_loads,
            stored_blocks=engine.prefix_events.stored_blocks,
            times=hosted.times,
            promises=lambda: engine.promises,
            device_time=hosted.device_time,
        )
        with host.metrics.reporting(ref.worker_id, reporting):
            await host.serve(server, drain)
    finally:
        await leave()
