"""The HTTP server of the OpenAI API and of the status page."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace_common.access.credentials import TlsFiles
from headrace_common.access.tls import server_context
from headrace_common.config import split_host_port
from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError
from headrace_common.rpc.listener import CONNECTION_IDLE_S
from headrace_frontend.config import FrontendConfig
from headrace_frontend.openai.exchange import PEER_NAMES_EXTENSION, AsgiApp

_LOG = logging.getLogger(__name__)

HEADER_WAIT_S = 10.0
"""Time in which a client must send the headers of its first request."""
# The kernel ends a connection to a client that reads nothing for this long.
_UNREAD_MAX_MS = 60_000
_BACKLOG = 1_024
_CANCEL_WAIT_S = 1.0


class HttpServer:
    """Serves the app on the address of a setting. Raises ConfigError when it cannot listen there."""

    def __init__(
        self,
        app: AsgiApp,
        config: FrontendConfig,
        setting: str = "http_listen",
        tls: TlsFiles | None = None,
    ) -> None:
        """`setting` names the setting with the address. `tls`: None means the files of `listen`."""
        self._listen = str(getattr(config, setting))
        self._tls = server_context(config.listen_tls if tls is None else tls, setting)
        self._socket = _listening_socket(self._listen, setting)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=config.connections_max(),
                timeout_keep_alive=max(1, round(CONNECTION_IDLE_S)),
                # The drain has a deadline of its own.
                timeout_graceful_shutdown=None,
                ssl_context_factory=None if self._tls is None else self._context,
            )
        )
        self._task: asyncio.Task[None] | None = None

    def _context(
        self, config: uvicorn.Config, default: Callable[[], ssl.SSLContext]
    ) -> ssl.SSLContext:
        assert self._tls is not None
        return self._tls

    @property
    def port(self) -> int:
        """The port that is really used."""
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The URL of the API, with the port that is really used."""
        scheme = "http" if self._tls is None else "https"
        host, _ = split_host_port(self._listen)
        return f"{scheme}://{host}:{self.port}"

    def start(self) -> None:
        """Serves from now on."""
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http-server")

    async def drain(self, deadline: Deadline) -> None:
        """Accepts no more connections, and returns when the requests in flight have ended, at the deadline at last."""
        if self._task is None:
            return
        self._server.stop_accepting()
        await asyncio.wait({self._task}, timeout=deadline.remaining_s() + _CANCEL_WAIT_S)

    async def stop(self) -> None:
        """Ends all requests."""
        self._socket.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


class _Server(uvicorn.Server):
    def stop_accepting(self) -> None:
        """Lets `serve` return when the open requests have ended."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the service."""
        yield


class _Protocol(HttpToolsProtocol):
    """Ends connections that send no request, and ignores upgrades such as that to h2c (RFC 9110, 7.8)."""

    _header_timer: asyncio.TimerHandle | None = None
    # What the parser must still read of the bytes that arrived.
    _pieces: tuple[bytes | memoryview, ...] = ()
    _piece: memoryview = memoryview(b"")
    _peer_names: tuple[bytes, ...] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._peer_names = _subject_names(transport.get_extra_info("peercert"))
        self._header_timer = self.loop.call_later(HEADER_WAIT_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        self._pieces = (data,)
        while self._pieces and not self.transport.is_closing():
            self._piece, self._pieces = memoryview(self._pieces[0]), self._pieces[1:]
            super().data_received(self._piece)  # type: ignore[arg-type]

    def _offers_upgrade(self) -> bool:
        return self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)

    def _unsupported_upgrade_warning(self) -> None:
        """Lets the parser, which stopped at the end of the headers, read the request without the offer and with its
        body.
        """
        stopped = sys.exception()
        if stopped is None or not self._offers_upgrade():
            return
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        head = b"\r\n".join((*lines, b"", b""))
        self._pieces = (head, self._piece[stopped.args[0] :], *self._pieces)

    def on_message_complete(self) -> None:
        if not self._offers_upgrade():
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        if self._offers_upgrade():
            return
        super().on_headers_complete()
        if self._peer_names:
            # The application starts in a later turn of the event loop.
            extensions: Any = {PEER_NAMES_EXTENSION: self._peer_names}
            self.scope["extensions"] = extensions

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def _subject_names(certificate: Any) -> tuple[bytes, ...]:
    """The URIs in a verified client certificate, as gRPC has them."""
    names = (certificate or {}).get("subjectAltName", ())
    return tuple(value.encode("ascii", "replace") for kind, value in names if kind == "URI")


def _listening_socket(listen: str, setting: str) -> socket.socket:
    host, port = split_host_port(listen)
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MAX_MS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{setting}: cannot listen on {listen}: {error.strerror}; stop what uses the port or set {setting}",
            metadata={setting: listen},
        ) from error
    listener.setblocking(False)
    return listener
