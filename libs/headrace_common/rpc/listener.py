"""One address of a service: a gRPC server with health, reflection and TLS. The listener of probes beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from headrace_common.access.credentials import TlsFiles
from headrace_common.access.table import Listener, is_served
from headrace_common.access.tls import TlsIdentity, tls_identity
from headrace_common.http.bounds import CONNECTION_IDLE_S
from headrace_common.ports import cannot_listen, check_free, split_host_port
from headrace_common.reloading import ReloadedFiles
from headrace_common.rpc.channel import MESSAGE_BYTES_MAX, keepalive_options
from headrace_common.rpc.handlers import Context, Continuation, Handler

LIVE: Final = "live"
"""The name that is SERVING as long as the process answers, also while it drains."""
_HEALTH_SETTING: Final = "health_listen"
CHECKS_MAX: Final = 16
"""Checks in progress. Further ones get RESOURCE_EXHAUSTED."""
_HEALTH_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 1_024),
    ("grpc.max_metadata_size", 8_192),
    ("grpc.absolute_max_metadata_size", 8_192),
    ("grpc.http2.hpack_table_size.decoder", 4_096),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_allowed_incoming_connections", 256),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.max_connection_age_ms", 60_000),
    ("grpc.max_connection_age_grace_ms", 5_000),
)


class HealthListener:
    """Answers health checks of callers without a credential, such as the probes of container platforms.

    It is a server of its own, which serves the RPC Check and nothing else, within small bounds. The name "" is SERVING
    as `set_serving` states, and `LIVE` always. Other names get NOT_FOUND.
    """

    def __init__(self, listen: str) -> None:
        """`listen` is "host:port". Port 0 takes any free port."""
        self._listen = listen
        self._server = grpc.aio.server(options=_HEALTH_OPTIONS, maximum_concurrent_rpcs=CHECKS_MAX)
        self._serving = False
        servicer = _CheckServicer(lambda: self._serving)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        self.endpoint = ""
        """The "host:port" on which it listens, after `start`."""

    def set_serving(self, *, serving: bool) -> None:
        """States whether the service takes work."""
        self._serving = serving

    async def start(self) -> None:
        """Answers checks from now on. Raises ConfigError when it cannot listen."""
        host, port = _listen(self._server, _HEALTH_SETTING, self._listen)
        await self._server.start()
        self.endpoint = f"{host}:{port}"

    async def stop(self) -> None:
        """Ends the listener at once."""
        await self._server.stop(None)


def _listen(
    server: grpc.aio.Server,
    setting: str,
    listen: str,
    credentials: grpc.ServerCredentials | None = None,
) -> tuple[str, int]:
    """Listens on the address of a setting, in plaintext without `credentials`. Returns host and port."""
    host, port = split_host_port(listen)
    check_free(setting, listen, host, port)
    try:
        if credentials is None:
            return host, server.add_insecure_port(listen)
        return host, server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise cannot_listen(setting, listen, str(error)) from error


class _CheckServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpcio has no stubs for it
    """Check alone. Watch and List are UNIMPLEMENTED, because callers without a credential could hold many of them."""

    def __init__(self, is_serving: Callable[[], bool]) -> None:
        self._is_serving = is_serving

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> health_pb2.HealthCheckResponse:
        states = health_pb2.HealthCheckResponse
        if request.service not in ("", LIVE):
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f'the names are "" for readiness and "{LIVE}"'
            )
        serving = self._is_serving() or request.service == LIVE
        return states(status=states.SERVING if serving else states.NOT_SERVING)


# An RPC that the event loop has not begun after this time is cancelled by gRPC. Its own limit is 30 s, which 2,000
# streams that begin together on a busy machine exceed. The caller's deadline is the bound.
_UNBEGUN_S = 3_600
CALL_METADATA_BYTES_MAX: Final = 16_384
"""Bytes of a call's metadata, with 32 for each entry. Their parsing holds the event loop."""
CALL_ENTRIES_MAX: Final = 512
"""Entries of a call's metadata: as many as fit in these bytes."""
_HEADER_TABLE_BYTES: Final = 4_096
PING_INTERVAL_S: Final = 1.0
"""Shortest time between two pings of a peer while no data flow."""
PING_STRIKES_MAX: Final = 2
"""Pings of a peer that come sooner. One more ends its connection."""
HANDSHAKE_S: Final = 10.0
"""Time in which a peer that connects must complete the handshakes of TLS and HTTP/2."""


def _milliseconds(seconds: float) -> int:
    return min(round(1e3 * seconds), 2**31 - 1) or 1


# RPCs that have arrived and that the event loop has not begun. Beyond it, gRPC cancels RPCs of every client. Its own
# limit is a thousand, which a burst of one client exceeds.
_PENDING_MAX = 65_536
# so_reuseport is off, because otherwise two services could share a port, each with half of the connections.
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", CALL_METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", CALL_METADATA_BYTES_MAX),
    ("grpc.http2.hpack_table_size.decoder", _HEADER_TABLE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(PING_INTERVAL_S)),
    ("grpc.http2.max_ping_strikes", PING_STRIKES_MAX),
    ("grpc.server_handshake_timeout_ms", _milliseconds(HANDSHAKE_S)),
    # Before a peer has acknowledged the settings, gRPC applies no bound on metadata but 16 MiB.
    ("grpc.http2.settings_timeout", _milliseconds(HANDSHAKE_S)),
    ("grpc.server.max_pending_requests", _PENDING_MAX),
    ("grpc.server.max_pending_requests_hard_limit", _PENDING_MAX),
    ("grpc.server_max_unrequested_time_in_server", _UNBEGUN_S),
)
INTERNAL_STREAMS_MAX = 4_096
# RPCs in flight on one connection of a client. More wait in the client's gRPC library.
CLIENT_STREAMS_MAX = 1_024
CLIENT_CONNECTION_AGE_S = 3_600.0
"""Age at which a client's connection takes no new RPC. RPCs in flight go on, and the client opens another one."""
INTERNAL_CONNECTION_AGE_S = 3_600.0
"""Seconds before a connection to internal_listen takes no new RPC. The caller opens another one."""


def internal_options(
    connections_max: int, connection_age_s: float = INTERNAL_CONNECTION_AGE_S
) -> tuple[tuple[str, int], ...]:
    """The bounds on connections to internal_listen."""
    return (
        ("grpc.max_allowed_incoming_connections", connections_max),
        ("grpc.max_concurrent_streams", INTERNAL_STREAMS_MAX),
        ("grpc.max_connection_age_ms", _milliseconds(connection_age_s)),
    )


def client_options(max_connections: int) -> tuple[tuple[str, int], ...]:
    """The bounds on connections to the client listener."""
    return (
        ("grpc.max_concurrent_streams", CLIENT_STREAMS_MAX),
        ("grpc.max_connection_idle_ms", _milliseconds(CONNECTION_IDLE_S)),
        # Without max_connection_age_grace_ms, RPCs in flight go on until their own deadlines.
        ("grpc.max_connection_age_ms", _milliseconds(CLIENT_CONNECTION_AGE_S)),
        ("grpc.max_allowed_incoming_connections", max_connections),
    )


@dataclass(frozen=True, slots=True)
class Address:
    """Where a listener listens, and the "host:port" at which others reach it. Empty: the same."""

    listener: Listener
    listen: str
    advertise: str = ""


class MetadataBound(grpc.aio.ServerInterceptor):
    """Refuses calls with too many entries, before others read them: gRPC has no bound before its peer takes part."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """See gRPC."""
        if len(handler_call_details.invocation_metadata) > CALL_ENTRIES_MAX:
            return _TOO_MUCH_METADATA
        return await continuation(handler_call_details)


async def _refuse(requests: Any, context: Context) -> None:
    await context.abort(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"the call has more than {CALL_ENTRIES_MAX} entries of metadata; send fewer",
    )


_TOO_MUCH_METADATA: Handler = grpc.stream_stream_rpc_method_handler(_refuse)


class RpcListener:
    """Add servicers to `.server`, then bind and start.

    `services` are the full names for health checks and reflection. With `tls`, connections are encrypted. Callers then
    need a certificate if `certificates_required`.
    """

    def __init__(
        self,
        address: Address,
        services: Sequence[str],
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        *,
        tls: TlsFiles,
        certificates_required: bool = True,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        options: Sequence[tuple[str, int]] = (),
        further_health: Sequence[str] = (),
    ) -> None:
        """`further_health` are names for health checks alone."""
        self._further_health = tuple(further_health)
        self._address = address
        self._services = tuple(services)
        self._tls = tls
        self._certificates_required = certificates_required
        self.server: grpc.aio.Server = grpc.aio.server(
            interceptors=[MetadataBound(), *interceptors],
            options=(
                *_OPTIONS,
                ("grpc.max_receive_message_length", message_bytes_max),
                *keepalive_options(),
                *options,
            ),
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        names = (*self._services, health.SERVICE_NAME, *_REFLECTION_NAMES)
        _enable_reflection(self.server, names, _described(address.listener, names))
        self.port = 0

    def bind(self) -> str:
        """Listens, and returns the "host:port" at which others reach it. gRPC accepts calls after `start`.

        Raises ConfigError when it cannot listen on the address or read a TLS file.
        """
        setting, credentials = self._address.listener.value, self._credentials()
        host, self.port = _listen(self.server, setting, self._address.listen, credentials)
        if not self._address.advertise:
            return f"{host}:{self.port}"
        advertised_host, advertised_port = split_host_port(self._address.advertise)
        return f"{advertised_host}:{advertised_port or self.port}"

    async def start(self) -> None:
        """Accepts calls, and reports SERVING."""
        await self.server.start()
        await self.set_health(serving=True)

    async def set_health(self, *, serving: bool) -> None:
        """Sets the health status of the listener and of each of its services."""
        for name in ("", *self._services, *self._further_health):
            await self.set_health_of(name, serving=serving)

    async def set_health_of(self, name: str, *, serving: bool) -> None:
        """Sets the health status of one name."""
        states = health_pb2.HealthCheckResponse
        await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    def _credentials(self) -> grpc.ServerCredentials | None:
        if not self._tls.tls_certificate_file:
            return None
        certificates = _ServedCertificates(tls_identity(self._tls))
        return grpc.dynamic_ssl_server_credentials(
            certificates.initial,
            certificates.changed,  # type: ignore[arg-type]  # the stubs lack the None of gRPC's documentation
            require_client_authentication=self._certificates_required,
        )


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
        [(identity.key, identity.certificate)], identity.authority or None
    )


_REFLECTION_NAMES: Final = (reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection")


# The workers of one process serve the same.
@lru_cache(maxsize=16)
def _described(listener: Listener, services: tuple[str, ...]) -> descriptor_pool.DescriptorPool:
    """A pool with these services, less the methods that belong to another listener. Do not add to it."""
    described = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name in added:
            return
        added.add(file.name)
        for dependency in file.dependencies:
            add(dependency)
        content = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(content)
        for service in content.service:
            full_name = f"{content.package}.{service.name}"
            kept = [
                method
                for method in service.method
                if is_served(f"/{full_name}/{method.name}", listener)
            ]
            service.ClearField("method")
            service.method.extend(kept)
        described.Add(content)

    for name in services:
        add(descriptor_pool.Default().FindFileContainingSymbol(name))
    return described


def _enable_reflection(
    server: grpc.aio.Server, names: Sequence[str], pool: descriptor_pool.DescriptorPool
) -> None:
    """Serves the descriptions in `pool` of the services with these names.

    Both versions of the protocol are served. The package grpcio-reflection has v1alpha alone.
    """
    servicer = reflection.aio.ReflectionServicer(names, pool=pool)
    # The messages of both versions are the same.
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
            for name in _REFLECTION_NAMES
        ]
    )


def _describe_stable() -> None:
    """Adds the file of v1 to the default pool: that of v1alpha with its own names."""
    content = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(content)
    text = text_format.MessageToString(content)
    stable = text_format.Parse(text.replace("v1alpha", "v1"), descriptor_pb2.FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(stable.SerializeToString())


_describe_stable()
