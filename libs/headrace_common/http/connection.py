"""One HTTP connection within bounds."""

from __future__ import annotations

import asyncio
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from headrace_common.callers.bounds import host_of
from headrace_common.http.bounds import (
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    PIPELINED_MAX,
    UNREAD_INPUT,
    HttpBounds,
)
from headrace_common.http.exchange import HttpExchange
from headrace_common.http.parser import Refused, RequestParser

if TYPE_CHECKING:
    from headrace_common.http.server import HttpServer

# Less than this is not worth its counting: a connection has no more, and connections are bounded.
_COUNTED_BYTES: Final = 4_096
# What a request that waits takes beside its body: its headers and objects of Python.
_WAITING_REQUEST_BYTES: Final = 8_192
# No more is read of a connection with so many bytes that no handler reads.
_UNREAD_MAX: Final = 65_536
# So much is sent before the end of the event loop's turn.
_UNSENT_MAX: Final = 65_536


class Connection(asyncio.Protocol):
    """Serves its requests one after the other, and counts what they keep in memory.

    A client that ends its direction has closed the connection.
    """

    transport: asyncio.Transport

    def __init__(self, bounds: HttpBounds, server: HttpServer) -> None:
        self.caller = ""
        """The client's host."""
        self.peer_names: tuple[bytes, ...] = ()
        """The URIs in the client's certificate."""
        self.server = server
        self.write_paused = False
        """Whether the client must read before more is written."""
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser(self)
        # Those without a whole response. The first is served.
        self._exchanges: deque[HttpExchange] = deque()
        self._timer: asyncio.TimerHandle | None = None
        # Whether no request has arrived yet.
        self._new = True
        self._holds_input = False
        self._unsent = b""
        self._writable = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.peer_names = _subject_names(transport.get_extra_info("peercert"))
        self.caller = host_of((transport.get_extra_info("peername") or ("unknown",))[0])
        self.server.add(self)
        self._start_timer(self._bounds.head_wait_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._release_input()
        self.server.forget(self)
        exchanges = tuple(self._exchanges)
        # Each refers to this object, which is freed now, and not by a later garbage collection.
        self._exchanges.clear()
        self._parser.close()
        for exchange in exchanges:
            exchange.disconnect()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        try:
            self._parser.feed(data)
        except Refused as refused:
            self._refuse(refused.status)
            return
        if self._parser.in_head and self._timer is None:
            self._start_timer(self._bounds.head_wait_s)
        self.count_input()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._writable.set()

    async def until_writable(self) -> None:
        """Waits while the client must read."""
        while self.write_paused:
            await self._writable.wait()

    def write(self, data: bytes) -> None:
        """Sends data, together with what else is written in this turn of the event loop."""
        if self._unsent:
            self._unsent += data
        else:
            self._unsent = data
            self.server.flush_soon(self)
        if len(self._unsent) >= _UNSENT_MAX:
            self.flush()

    def flush(self) -> None:
        """Sends what was written, unless the connection has ended."""
        data, self._unsent = self._unsent, b""
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def close(self) -> None:
        """Ends the connection after what was written."""
        self.flush()
        self.transport.close()

    def shut_down(self) -> None:
        """Ends the connection after the responses to its requests."""
        if self._exchanges:
            self._exchanges[-1].close_after()
        else:
            self.close()

    def begin_head(self) -> None:
        """The first byte of a request has arrived."""
        if not self._new:
            self._stop_timer()

    def start_request(self, exchange: HttpExchange) -> None:
        """The headers of a request have arrived. May raise Refused."""
        if len(self._exchanges) > PIPELINED_MAX:
            raise Refused(HTTPStatus.TOO_MANY_REQUESTS)
        self._new = False
        self._stop_timer()
        self.server.start_request(self)
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self.server.serve(self, exchange)

    def add_body(self, data: bytes) -> None:
        """A part of the request's body has arrived."""
        # Nothing wants the rest of a request that was answered.
        if self._exchanges:
            self._exchanges[-1].add_body(data)

    def end_body(self) -> None:
        """The request is complete."""
        if self._exchanges:
            self._exchanges[-1].end_body()
        else:
            self._start_timer(self._bounds.idle_s)

    def end_response(self, data: bytes, *, keeps_alive: bool) -> None:
        """Sends the end of the response to the oldest request. The next one is served."""
        self.write(data)
        if self.transport.is_closing():
            return
        self._exchanges.popleft()
        if not keeps_alive:
            self.close()
            return
        self.count_input()
        if self._exchanges:
            self.server.serve(self, self._exchanges[0])
            return
        self.server.end_request(self)
        in_body = self._parser.in_body
        self._start_timer(self._bounds.body_pause_s if in_body else self._bounds.idle_s)

    def end_serving(self, exchange: HttpExchange) -> None:
        """The application has ended, for this request."""
        if exchange in self._exchanges:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR)

    def count_input(self) -> None:
        """Counts what the client's requests keep in memory. Reads on, or not, by what no handler reads."""
        if self.transport.is_closing():
            return
        held = sum([exchange.count_body() for exchange in self._exchanges])
        waiting = max(0, len(self._exchanges) - 1)
        if waiting or held > _UNREAD_MAX:
            self.transport.pause_reading()
        elif not self.transport.is_reading():
            self.transport.resume_reading()
        held += self._parser.head_bytes + waiting * _WAITING_REQUEST_BYTES
        if held >= _COUNTED_BYTES:
            self._holds_input = True
            UNREAD_INPUT.hold(self, held)
        else:
            self._release_input()

    def _release_input(self) -> None:
        if self._holds_input:
            self._holds_input = False
            UNREAD_INPUT.release(self)

    def end_input(self) -> None:
        """Refuses the request, so that others have its memory."""
        self._holds_input = False
        self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)

    def _refuse(self, status: HTTPStatus) -> None:
        """Closes the connection, with this status unless that would be a part of another response."""
        if self.transport.is_closing():
            return
        if len(self._exchanges) > 1 or any(exchange.started for exchange in self._exchanges):
            self.transport.abort()
        else:
            self.write(refusal_of(status))
            self.close()

    def _start_timer(self, wait_s: float) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(wait_s, self._end_wait)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_wait(self) -> None:
        self._timer = None
        if self._parser.in_head:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
        elif self._new or self._parser.in_body:
            self.transport.abort()
        else:
            self.close()


def refusal_of(status: HTTPStatus) -> bytes:
    """A whole response without an application."""
    text = f"{_REMEDIES.get(status, 'the request is no valid HTTP/1.1')}\n"
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
        f"content-length: {len(text)}\r\nconnection: close\r\n\r\n"
    )
    return (head + text).encode()


_REMEDIES: Final = {
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: (
        f"request line and headers have more than {HEAD_BYTES_MAX} bytes or {HEADERS_MAX} headers; send fewer"
    ),
    HTTPStatus.REQUEST_TIMEOUT: "the headers did not arrive in time; send them at once",
    HTTPStatus.TOO_MANY_REQUESTS: f"{PIPELINED_MAX} requests wait on this connection; read their responses",
    HTTPStatus.INTERNAL_SERVER_ERROR: "the request failed; the log of the server has the reason",
    HTTPStatus.SERVICE_UNAVAILABLE: "too many clients send requests at the same time; try again later",
}


def _subject_names(certificate: Any) -> tuple[bytes, ...]:
    """The URIs in a verified client certificate, as gRPC has them."""
    names = (certificate or {}).get("subjectAltName", ())
    return tuple(value.encode("ascii", "replace") for kind, value in names if kind == "URI")
