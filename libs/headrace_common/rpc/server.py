"""The gRPC server of every service: health, reflection, errors, traces, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace_common.access.authorizer import Authorizer
from headrace_common.access.credentials import Credentials
from headrace_common.access.tls import TlsIdentity, tls_identity
from headrace_common.config import ServiceConfig, split_host_port
from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError
from headrace_common.reloading import ReloadedFiles
from headrace_common.rpc.access import AccessInterceptor
from headrace_common.rpc.channel import (
    MESSAGE_BYTES_MAX,
    METADATA_BYTES_MAX,
    keepalive_options,
)
from headrace_common.rpc.in_flight import InFlightInterceptor
from headrace_common.rpc.status import ErrorInterceptor
from headrace_common.rpc.trace_context import TraceInterceptor

_LOG = logging.getLogger(__name__)

# so_reuseport is off, because otherwise two services could share a port, each with half of the connections.
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES_MAX),
    ("grpc.max_concurrent_streams", 4_096),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)

_CANCEL_WAIT_S = 1.0
DRAIN_OVERRUN_MAX_S = 4.0
"""Time after the grace in which a service ends unfinished work."""

Drainer = Callable[[Deadline], Awaitable[None]]


class GrpcServer:
    """One server on one port. Add servicers to `.server`, start it, then serve until a signal.

    It refuses callers as the access table says. Raises ConfigError when a file of the settings cannot be read.

    `services` are the full names for health checks and reflection. `interceptors` run inside those for
    errors and traces. `message_bytes_max` bounds a received message, also after decompression.
    """

    def __init__(
        self,
        config: ServiceConfig,
        services: Sequence[str],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        self._config = config
        self._services = tuple(services)
        self._in_flight = InFlightInterceptor()
        self.server: grpc.aio.Server = grpc.aio.server(
            interceptors=[
                ErrorInterceptor(),
                AccessInterceptor(Authorizer.from_config(config)),
                self._in_flight,
                TraceInterceptor(),
                *interceptors,
            ],
            options=(
                *_OPTIONS,
                ("grpc.max_receive_message_length", message_bytes_max),
                *keepalive_options(),
            ),
        )
        self._health = health.aio.HealthServicer()
        self._health_updates: set[asyncio.Task[None]] = set()
        self._drain_requested = asyncio.Event()
        self._drain_deadline: Deadline | None = None
        self._stop_requested = False
        self._stop_now = asyncio.Event()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)

    @property
    def draining(self) -> bool:
        """Whether a drain was requested."""
        return self._drain_requested.is_set()

    async def start(self) -> str:
        """Listens, reports SERVING and returns the host:port at which others reach this server.

        Raises ConfigError when it cannot listen on the address or read a TLS file.
        """
        host, port = split_host_port(self._config.listen)
        _check_free(self._config.listen, host, port)
        credentials = self._credentials()
        try:
            if credentials is None:
                port = self.server.add_insecure_port(self._config.listen)
            else:
                port = self.server.add_secure_port(self._config.listen, credentials)
        except RuntimeError as error:
            raise _cannot_listen(self._config.listen, str(error)) from error
        await self.server.start()
        await self._set_health(True)
        advertised = self._advertised(host, port)
        if self._config.port_file:
            write_port_file(self._config.port_file, advertised)
        return advertised

    def set_serving(self, serving: bool) -> None:
        """Sets the health status of the server and of each of its services."""
        update = asyncio.get_running_loop().create_task(self._set_health(serving))
        self._health_updates.add(update)
        update.add_done_callback(self._health_updates.discard)

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
            await self.server.stop(None)

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
        await self._set_health(False)
        try:
            async with asyncio.timeout(deadline.remaining_s() + DRAIN_OVERRUN_MAX_S):
                await on_drain(deadline)
        except TimeoutError:
            _LOG.warning("work in flight did not end within the drain grace")
        stop = asyncio.create_task(self.server.stop(deadline.remaining_s() + _CANCEL_WAIT_S))
        if not await self._in_flight.wait_answered(deadline):
            _LOG.warning("ending %d unfinished requests", self._in_flight.answer_count)
        self._in_flight.cancel_all()
        # A stream cancelled during a write ends without a status and would delay the server until
        # the end of the grace. stop(None) in serve_until_stopped ends it.
        await asyncio.wait({stop}, timeout=_CANCEL_WAIT_S)

    async def _set_health(self, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        state = states.SERVING if serving else states.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, state)

    def _credentials(self) -> grpc.ServerCredentials | None:
        if not self._config.tls_certificate_file:
            return None
        certificates = _ServedCertificates(tls_identity(Credentials.from_config(self._config).tls))
        return grpc.dynamic_ssl_server_credentials(
            certificates.initial,
            certificates.changed,  # type: ignore[arg-type]  # the stubs lack the None of gRPC's documentation
            require_client_authentication=True,
        )

    def _advertised(self, host: str, port: int) -> str:
        if not self._config.advertise:
            return f"{host}:{port}"
        advertised_host, advertised_port = split_host_port(self._config.advertise)
        return f"{advertised_host}:{advertised_port or port}"


class _ServedCertificates:
    """The certificates of a server in the form that gRPC takes. Connections that exist are unaffected by changes."""

    def __init__(self, files: ReloadedFiles[TlsIdentity]) -> None:
        self._files = files
        self._used = files.current()
        self.initial = _configuration(self._used)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration after a change, else None. gRPC calls it before each handshake, from its threads."""
        identity = self._files.current()
        if identity is self._used:
            return None
        self._used = identity
        return _configuration(identity)


def _configuration(identity: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(identity.key, identity.certificate)], identity.authority
    )


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


def _cannot_listen(listen: str, why: str) -> ConfigError:
    return ConfigError(
        f"cannot listen on {listen}: {why}; stop what uses the port or set listen",
        metadata={"listen": listen, "cause": why},
    )


def _check_free(listen: str, host: str, port: int) -> None:
    """Binds the port once before gRPC does, because gRPC hides the reason of a failure."""
    try:
        addresses = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in addresses:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise _cannot_listen(listen, error.strerror or str(error)) from error


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
