"""The HTTP server of every service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from headrace_common.access.credentials import TlsFiles
from headrace_common.access.tls import server_context
from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError
from headrace_common.http.bounds import HttpBounds
from headrace_common.http.connection import Connection, refusal_of
from headrace_common.http.exchange import HttpExchange
from headrace_common.ports import split_host_port

_LOG = logging.getLogger(__name__)

HttpApp: TypeAlias = Callable[[HttpExchange], Coroutine[Any, Any, None]]
# What ends each connection or handshake that waits, in the order in which their waits began.
_Waiting: TypeAlias = dict[Any, Callable[[], object]]

# The kernel ends a connection to a client that reads nothing for this long.
_UNREAD_MAX_MS: Final = 60_000
_BACKLOG: Final = 1_024
# Connections that are accepted in one turn of the event loop.
_ACCEPTED_MAX: Final = 64
_ACCEPT_PAUSE_S: Final = 1.0
_SHUTDOWN_S: Final = 5.0
_CANCEL_WAIT_S: Final = 1.0


class HttpServer:
    """Serves an application within bounds.

    When all connections are in use, a new one ends that which has waited longest without a request: first of those
    that never had one, then of handshakes, then of the others. Without any, the new one gets status 503.
    """

    def __init__(
        self, app: HttpApp, listen: str, *, setting: str, tls: TlsFiles, bounds: HttpBounds
    ) -> None:
        """`setting` names the setting with the address. Raises ConfigError when it cannot listen there."""
        self._listen = listen
        self._bounds = bounds
        self._tls_options: Mapping[str, Any] = {}
        if (context := server_context(tls, setting)) is not None:
            wait_s = {
                "ssl_handshake_timeout": bounds.head_wait_s,
                "ssl_shutdown_timeout": _SHUTDOWN_S,
            }
            self._tls_options = {"ssl": context, **wait_s}
        self._socket = _listening_socket(listen, setting)
        self._app = app
        self._loop = asyncio.get_running_loop()
        self._accepts = False
        self._ended = asyncio.Event()
        self._requests: set[asyncio.Task[None]] = set()
        self._connections: set[Connection] = set()
        self._unsent: list[Connection] = []
        self._handshakes: _Waiting = {}
        self._new: _Waiting = {}
        self._idle: _Waiting = {}

    @property
    def port(self) -> int:
        """The port that is really used."""
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """The URL of the API, with the port that is really used."""
        scheme = "https" if self._tls_options else "http"
        host, _ = split_host_port(self._listen)
        return f"{scheme}://{host}:{self.port}"

    def start(self) -> None:
        """Serves from now on."""
        self._accepts = True
        self._resume_accepting()

    async def drain(self, deadline: Deadline) -> None:
        """Accepts no more connections, and returns when the requests in flight have ended, at the deadline at last."""
        self._stop_accepting()
        for connection in tuple(self._connections):
            connection.shut_down()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline.remaining_s() + _CANCEL_WAIT_S):
                while self._connections:
                    self._ended.clear()
                    await self._ended.wait()
                if self._requests:
                    await asyncio.wait(self._requests)

    async def stop(self) -> None:
        """Ends all requests."""
        self._stop_accepting()
        for handshake in tuple(self._handshakes):
            handshake.cancel()
        for connection in tuple(self._connections):
            connection.transport.abort()
        if tasks := {*self._handshakes, *self._requests}:
            await asyncio.wait(tasks, timeout=_CANCEL_WAIT_S)

    def add(self, connection: Connection) -> None:
        """See `Listener`."""
        self._connections.add(connection)
        self._new[connection] = partial(self._end, connection)
        if not self._accepts:
            # Its handshake has lasted into the drain.
            connection.shut_down()

    def start_request(self, connection: Connection) -> None:
        """See `Listener`."""
        self._new.pop(connection, None)
        self._idle.pop(connection, None)

    def serve(self, connection: Connection, exchange: HttpExchange) -> None:
        """See `Listener`."""
        # Without what an earlier request has put into its context.
        request = self._loop.create_task(self._app(exchange), context=Context())
        self._requests.add(request)
        request.add_done_callback(partial(self._end_serving, connection, exchange))

    def _end_serving(
        self, connection: Connection, exchange: HttpExchange, request: asyncio.Task[None]
    ) -> None:
        self._requests.discard(request)
        if not request.cancelled() and (error := request.exception()) is not None:
            _LOG.error("%s %s has failed", exchange.method, exchange.path, exc_info=error)
        connection.end_serving(exchange)

    def end_request(self, connection: Connection) -> None:
        """See `Listener`."""
        self._idle[connection] = partial(self._end, connection)

    def forget(self, connection: Connection) -> None:
        """See `Listener`."""
        self._connections.discard(connection)
        self._new.pop(connection, None)
        self._idle.pop(connection, None)
        self._ended.set()

    def flush_soon(self, connection: Connection) -> None:
        """See `Listener`."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(connection)

    def _flush(self) -> None:
        connections, self._unsent = self._unsent, []
        for connection in connections:
            connection.flush()

    def _resume_accepting(self) -> None:
        if self._accepts:
            self._loop.add_reader(self._socket, self._accept)

    def _stop_accepting(self) -> None:
        if self._accepts:
            self._accepts = False
            self._loop.remove_reader(self._socket)
        self._socket.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_MAX):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                pause = f"no connection is accepted for {_ACCEPT_PAUSE_S:g} s"
                _LOG.error("%s: %s: %s", self.url, pause, error)
                self._loop.remove_reader(self._socket)
                self._loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)
                return
            accepted.setblocking(False)
            if self._has_room():
                self._open(accepted)
            else:
                self._refuse(accepted)

    def _has_room(self) -> bool:
        """Whether a new connection fits, after the end of one that waits if need be."""
        if len(self._connections) + len(self._handshakes) < self._bounds.connections_max:
            return True
        for waiting in (self._new, self._handshakes, self._idle):
            for oldest, end in waiting.items():
                del waiting[oldest]
                end()
                return True
        return False

    def _end(self, connection: Connection) -> None:
        self.forget(connection)
        connection.transport.abort()

    def _refuse(self, accepted: socket.socket) -> None:
        # A client that has left gets nothing.
        with accepted, contextlib.suppress(OSError):
            if not self._tls_options:
                accepted.send(refusal_of(HTTPStatus.SERVICE_UNAVAILABLE))

    def _open(self, accepted: socket.socket) -> None:
        opening = self._loop.connect_accepted_socket(
            lambda: Connection(self._bounds, self), accepted, **self._tls_options
        )
        handshake = self._loop.create_task(opening)
        self._handshakes[handshake] = handshake.cancel
        handshake.add_done_callback(partial(self._end_handshake, accepted))

    def _end_handshake(self, accepted: socket.socket, handshake: asyncio.Task[Any]) -> None:
        self._handshakes.pop(handshake, None)
        # TLS's errors and ends of the time are among them.
        if handshake.cancelled() or handshake.exception() is not None:
            _LOG.debug("a handshake has failed: %s", handshake)
            accepted.close()


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
