"""Answers health checks on `health_listen`, for the probes of container platforms.

These probes have no credential, and some of them no TLS. So this listener is a server of its own, which serves
the RPC Check and nothing else, within small bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace_common.config import split_host_port
from headrace_common.ports import cannot_listen, check_free

LIVE: Final = "live"
"""The name that is SERVING as long as the process answers, also while it drains."""
_SETTING: Final = "health_listen"
CHECKS_MAX: Final = 16
"""Checks in progress. Further ones get RESOURCE_EXHAUSTED."""
_OPTIONS: Final = (
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
    """The name "" is SERVING as `set_serving` states, and `LIVE` always. Other names get NOT_FOUND."""

    def __init__(self, listen: str) -> None:
        """`listen` is "host:port". Port 0 takes any free port."""
        self._listen = listen
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=CHECKS_MAX)
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
        host, port = split_host_port(self._listen)
        check_free(_SETTING, self._listen, host, port)
        try:
            bound = self._server.add_insecure_port(self._listen)
        except RuntimeError as error:
            raise cannot_listen(_SETTING, self._listen, str(error)) from error
        await self._server.start()
        self.endpoint = f"{host}:{bound}"

    async def stop(self) -> None:
        """Ends the listener at once."""
        await self._server.stop(None)


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
