"""The gRPC server of every service: its listeners, errors, traces, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc.aio

from headrace.incident.v1.incident_pb2_grpc import add_IncidentServiceServicer_to_server
from headrace_common.access.authorizer import CREDENTIAL_CHECK_S, Authorizer
from headrace_common.access.credentials import TlsFiles
from headrace_common.access.table import Listener
from headrace_common.callers.bounds import CallerBounds
from headrace_common.client_config import (
    ClientAccessConfig,
    ClientFacingConfig,
    reserve_descriptors,
)
from headrace_common.config import ServiceConfig
from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError
from headrace_common.process.events import EVENTS, INCIDENT_SERVICE, IncidentServicer
from headrace_common.rpc.access import CallerInterceptor, ClientAccess, InternalAccess, TenantOf
from headrace_common.rpc.channel import MESSAGE_BYTES_MAX
from headrace_common.rpc.handlers import BoundsInterceptor, EndlessStreams, InFlightInterceptor
from headrace_common.rpc.listener import (
    CLIENT_CONNECTION_AGE_S,
    INTERNAL_CONNECTION_AGE_S,
    Address,
    HealthListener,
    RpcListener,
    client_options,
    internal_options,
)
from headrace_common.rpc.status import ErrorInterceptor
from headrace_common.rpc.trace_context import TraceInterceptor
from headrace_common.tasks import BackgroundTasks

_LOG = logging.getLogger(__name__)

_CANCEL_WAIT_S = 1.0
DRAIN_OVERRUN_MAX_S = 4.0
"""Time after the grace in which a service ends unfinished work."""

Drainer = Callable[[Deadline], Awaitable[None]]


INTERNAL_CONNECTIONS_MAX: Final = 16_384
"""Connections to internal_listen, less under a low limit of open files: members, and the ranks of workers."""
_INTERNAL_CONNECTIONS_ENOUGH: Final = 1_024


def _internal_connections(config: ServiceConfig) -> int:
    """Leaves open files for the other listeners, so that no stranger on this one can use them up."""
    others = 0
    if isinstance(config, ClientAccessConfig):
        others = config.client_listeners * config.connections_max()
    return reserve_descriptors(
        INTERNAL_CONNECTIONS_MAX, others=others, enough=_INTERNAL_CONNECTIONS_ENOUGH
    )


def _without_tenant(metadata: Iterable[tuple[str, Any]]) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class ClientServices:
    """What the client listener serves.

    `names` are the full names for health checks and reflection. `interceptors` run inside those for errors and traces.
    `message_bytes_max` bounds a received message, also after decompression. `tenant_of` finds the tenant of a call.
    Without `callers`, the listener has bounds of its own, from the settings.
    """

    names: Sequence[str]
    interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
    message_bytes_max: int = MESSAGE_BYTES_MAX
    callers: CallerBounds | None = None
    tenant_of: TenantOf = _without_tenant


@dataclass(frozen=True, slots=True)
class InternalTimes:
    """How often credentials of open calls to internal_listen are checked, and when its connections take no new RPC."""

    credential_check_s: float = CREDENTIAL_CHECK_S
    connection_age_s: float = INTERNAL_CONNECTION_AGE_S


class GrpcServer:
    """The server of one service. Add servicers to `.server` and `.client_server`, start it, then serve until a signal.

    `.server` serves `services`, by their full names, on internal_listen. It refuses callers as the access table says.
    `message_bytes_max` is that of internal_listen, as in ClientServices. `.client_server` serves `clients` on listen.
    It is None without `clients`, or where `listen` is empty. Raises ConfigError when a file of the settings cannot be
    read.
    """

    def __init__(
        self,
        config: ServiceConfig,
        services: Sequence[str],
        clients: ClientServices | None = None,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        times: InternalTimes = InternalTimes(),
    ) -> None:
        self._config = config
        self._in_flight = InFlightInterceptor()
        common = (self._in_flight, TraceInterceptor())
        self._authorizer = Authorizer.from_config(config, config.audiences)
        internal = RpcListener(
            Address(Listener.INTERNAL, config.internal_listen, config.internal_advertise),
            (*services, INCIDENT_SERVICE),
            [
                ErrorInterceptor(),
                InternalAccess(self._authorizer, check_s=times.credential_check_s),
                *common,
                BoundsInterceptor(),
            ],
            tls=TlsFiles.from_config(config),
            message_bytes_max=message_bytes_max,
            options=internal_options(_internal_connections(config), times.connection_age_s),
        )
        self.server: grpc.aio.Server = internal.server
        add_IncidentServiceServicer_to_server(IncidentServicer(EVENTS), internal.server)
        self.client_server: grpc.aio.Server | None = None
        self._endpoint = ""
        self.client_endpoint = ""
        """The "host:port" at which clients reach this server, once it has started. Empty without a client listener."""
        self._listeners = [internal]
        if clients is not None and isinstance(config, ClientFacingConfig) and config.listen:
            facing = self._client_listener(config, clients, common)
            self.client_server = facing.server
            self._listeners.append(facing)
        self._probes = HealthListener(config.health_listen) if config.health_listen else None
        self._health_updates = BackgroundTasks("a report of health")
        self._drain_requested = asyncio.Event()
        self._drain_deadline: Deadline | None = None
        self._stop_requested = False
        self._stop_now = asyncio.Event()

    def _client_listener(
        self,
        config: ClientFacingConfig,
        clients: ClientServices,
        common: Sequence[grpc.aio.ServerInterceptor],
    ) -> RpcListener:
        callers = clients.callers or CallerBounds()
        in_turns = CallerInterceptor(callers, clients.tenant_of)
        return RpcListener(
            Address(Listener.CLIENT, config.listen, config.advertise),
            clients.names,
            [
                *(ErrorInterceptor(), ClientAccess(), in_turns, *common),
                EndlessStreams(CLIENT_CONNECTION_AGE_S),
                *clients.interceptors,
            ],
            tls=config.listen_tls,
            certificates_required=config.client_certificates,
            message_bytes_max=clients.message_bytes_max,
            options=client_options(config.connections_max()),
        )

    async def start(self) -> str:
        """Listens, reports SERVING and returns the host:port at which other services reach this server.

        Raises ConfigError when it cannot listen on an address or read a TLS file.
        """
        endpoints = [listener.bind() for listener in self._listeners]
        self._authorizer.serve_at(endpoints[0])
        for listener in self._listeners:
            await listener.start()
        if self._probes is not None:
            await self._probes.start()
            self._probes.set_serving(serving=True)
            _LOG.info("health checks are answered on %s", self._probes.endpoint)
        self._endpoint = endpoints[0]
        self.client_endpoint = endpoints[1] if len(endpoints) > 1 else ""
        if self._config.port_file:
            write_port_file(self._config.port_file, self.port_line)
        return self._endpoint

    @property
    def port_line(self) -> str:
        """The content of the port file: the internal address, and that for clients if there is one."""
        return " ".join(filter(None, (self._endpoint, self.client_endpoint)))

    async def stop(self, grace_s: float | None) -> None:
        """Ends the listeners. RPCs in flight may take `grace_s`; None ends them at once, and health_listen too."""
        await asyncio.gather(*(listener.server.stop(grace_s) for listener in self._listeners))
        if self._probes is not None and grace_s is None:
            await self._probes.stop()

    def set_serving(self, serving: bool) -> None:
        """Sets the health status of the server and of each of its services. That of health_listen changes at once."""
        if self._probes is not None:
            self._probes.set_serving(serving=serving)
        self._health_updates.start(self._set_health(serving=serving))

    def request_stop(self) -> None:
        """Starts a drain, as SIGTERM does. A second call ends the drain at once."""
        if self._stop_requested:
            self._stop_now.set()
        self._stop_requested = True
        self.request_drain()

    def request_drain(self, grace_s: float | None = None) -> Deadline:
        """Starts a drain, unless one has started. Returns the deadline of requests in flight.

        None means drain_grace_s.
        """
        if self._drain_deadline is None:
            grace_s = self._config.drain_grace_s if grace_s is None else grace_s
            self._drain_deadline = Deadline.after(grace_s)
            self._drain_requested.set()
        return self._drain_deadline

    async def serve_until_signal(self, on_drain: Drainer) -> None:
        """As serve_until_stopped; SIGTERM and SIGINT call `request_stop`."""
        with stop_signals(self.request_stop):
            notify_ready()
            await self.serve_until_stopped(on_drain)

    async def serve_until_stopped(self, on_drain: Drainer) -> None:
        """Serves until `request_stop` or `request_drain`, then drains and returns.

        A drain first reports NOT_SERVING and awaits `on_drain` with the deadline. During `on_drain` the
        server accepts RPCs, because work in flight may need them. The service itself rejects new work,
        and at the deadline ends the rest. After `on_drain` the server rejects every new RPC and waits
        for those in flight. At the deadline it ends them with Draining; endless streams too. A second
        `request_stop` ends the drain at once.
        """
        try:
            await self._drain_requested.wait()
            await self._drain(on_drain, self.request_drain())
        finally:
            await self.stop(None)

    async def _drain(self, on_drain: Drainer, deadline: Deadline) -> None:
        _LOG.info("draining for up to %g s", deadline.remaining_s())
        drain = asyncio.create_task(self._drain_in_order(on_drain, deadline))
        stop_now = asyncio.create_task(self._stop_now.wait())
        try:
            await asyncio.wait({drain, stop_now}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop_now.cancel()
            drain.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await drain

    async def _drain_in_order(self, on_drain: Drainer, deadline: Deadline) -> None:
        await self._set_health(serving=False)
        try:
            async with asyncio.timeout(deadline.remaining_s() + DRAIN_OVERRUN_MAX_S):
                await on_drain(deadline)
        except TimeoutError:
            _LOG.warning("work in flight did not end within the drain grace")
        stop = asyncio.create_task(self.stop(deadline.remaining_s() + _CANCEL_WAIT_S))
        if not await self._in_flight.wait_answered(deadline):
            _LOG.warning("ending %d unfinished requests", self._in_flight.answer_count)
        self._in_flight.cancel_all()
        # A stream cancelled during a write ends without a status and would delay the server until
        # the end of the grace. stop(None) in serve_until_stopped ends it.
        await asyncio.wait({stop}, timeout=_CANCEL_WAIT_S)

    async def _set_health(self, *, serving: bool) -> None:
        if self._probes is not None:
            self._probes.set_serving(serving=serving)
        for listener in self._listeners:
            await listener.set_health(serving=serving)


@contextlib.contextmanager
def stop_signals(on_signal: Callable[[], None]) -> Iterator[None]:
    """In this context, SIGTERM and SIGINT call `on_signal`."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def notify_ready() -> None:
    """Reports to systemd that this process serves, if a unit of the type notify has started it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            # "@" stands for the first byte of an abstract address.
            sender.sendto(b"READY=1", f"\0{address[1:]}" if address[0] == "@" else address)
        except OSError as error:
            _LOG.warning("systemd gets no report of the start on %s: %s", address, error)


def write_port_file(path: str, advertised: str) -> None:
    """Writes the file atomically. Raises ConfigError when it cannot be written."""
    draft = Path(f"{path}.{os.getpid()}")
    try:
        draft.write_text(advertised, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write port_file {path}: {error.strerror}; "
            "name a file in a folder that this user can write to",
            metadata={"port_file": path},
        ) from error
