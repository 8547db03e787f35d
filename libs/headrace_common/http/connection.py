"""One HTTP connection within bounds."""

from __future__ import annotations

import asyncio
from collections import deque
from http import HTTPStatus
from typing import Any, Final, Protocol
from urllib.parse import unquote

import httptools

from headrace_common.callers.bounds import InputMemory, host_of
from headrace_common.http.bounds import (
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    PIPELINED_MAX,
    UNREAD_BYTES_MAX,
    HttpBounds,
)
from headrace_common.http.exchange import HttpExchange
from headrace_common.http.http2 import PREFACE, Http2Refusal

# A chunk of one byte takes six. Other bytes around a body, such as trailers, are few.
_FRAMING_PER_BODY_BYTE: Final = 8
# Less than this is not worth its counting: a connection has no more, and connections are bounded.
_COUNTED_BYTES: Final = 4_096
# What a request that waits takes beside its body: its headers and objects of Python.
_WAITING_REQUEST_BYTES: Final = 8_192
# No more is read of a connection with so many bytes that no handler reads.
_UNREAD_MAX: Final = 65_536
# So much is sent before the end of the event loop's turn.
_UNSENT_MAX: Final = 65_536


UNREAD_INPUT: Final = InputMemory(UNREAD_BYTES_MAX)


class Refused(Exception):
    """A request that is not valid, or beyond the bounds."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class RequestParser:
    """Refuses requests beyond the bounds, and ignores upgrades such as that to h2c (RFC 9110, 7.8)."""

    # That of the newest request.
    _exchange: HttpExchange

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parser = httptools.HttpRequestParser(self)
        # A request with "connection: close" is answered, whatever follows it.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        # Whether a part of the headers has arrived, and whether more of the body must arrive.
        self.in_head = self.in_body = False
        # Whether a request has ended in the piece that is parsed.
        self._ended_in_piece = False
        self.head_bytes = self._message_bytes = self._body_bytes = 0
        """The first: of incomplete headers."""

    def close(self) -> None:
        """Ends its use. Its parts refer to each other, and are freed now without a garbage collection."""
        vars(self).clear()

    def feed(self, data: bytes) -> None:
        """Parses bytes that arrived. Raises Refused."""
        pieces = [memoryview(data)]
        while pieces:
            piece = pieces.pop()
            fitting = HEAD_BYTES_MAX - self.head_bytes
            if len(piece) > fitting:
                pieces.append(piece[fitting:])
                piece = piece[:fitting]
            self._ended_in_piece = False
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserUpgrade as stopped:
                if self._parser.should_upgrade() and self._offers_upgrade():
                    # The parser has stopped at the end of the headers.
                    pieces += (piece[stopped.args[0] :], memoryview(self._head_without_upgrade()))
            except httptools.HttpParserError as error:
                # A callback's own error is its context.
                refused = error.__context__
                if not isinstance(refused, Refused):
                    refused = Refused(HTTPStatus.BAD_REQUEST)
                raise refused from None
            else:
                if self.in_head or self.in_body:
                    self._count(len(piece))

    def _count(self, size: int) -> None:
        """Counts a piece that does not end the request."""
        if self._ended_in_piece:
            # The piece has other requests too.
            size = self._body_bytes + len(self._url)
            size += sum(len(name) + len(value) for name, value in self._headers)
        self._message_bytes += size
        bytes_max = HEAD_BYTES_MAX - 1
        if self.in_head:
            self.head_bytes = self._message_bytes
        else:
            bytes_max = 2 * HEAD_BYTES_MAX + _FRAMING_PER_BODY_BYTE * self._body_bytes
        if self._message_bytes > bytes_max:
            raise Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _offers_upgrade(self) -> bool:
        """Whether a head of which the parser finds so names what to upgrade to."""
        return any(name.lower() == b"upgrade" for name, _ in self._headers)

    def _head_without_upgrade(self) -> bytes:
        """What the parser gets instead of a head, so that it reads the body too."""
        version = self._parser.get_http_version().encode()
        lines = [self._parser.get_method() + b" " + self._url + b" HTTP/" + version]
        lines += [name + b": " + text for name, text in self._headers if name.lower() != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    def on_message_begin(self) -> None:
        """See httptools."""
        self._connection.begin_head()
        self.in_head = True
        self._message_bytes = self._body_bytes = 0
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools. Trailers are among them."""
        self._headers.append((name, value))
        if len(self._headers) > HEADERS_MAX:
            raise Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_headers_complete(self) -> None:
        """See httptools."""
        self.in_head, self.head_bytes = False, 0
        if self._parser.should_upgrade() and self._offers_upgrade():
            return
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        chunks = self._parser.get_http_version() == "1.1"
        self._exchange = HttpExchange(
            self._connection,
            self._parser.get_method().decode("ascii"),
            unquote(path) if "%" in path else path,
            {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in self._headers
            },
            chunks=chunks,
            keeps_alive=chunks and self._parser.should_keep_alive(),
            query=(url.query or b"").decode("latin-1"),
        )
        self._connection.start_request(self._exchange)
        self.in_body = True

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._body_bytes += len(body)
        self._exchange.add_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        if not (self._parser.should_upgrade() and self._offers_upgrade()):
            self.in_body = False
            self._ended_in_piece = True
            self._exchange.end_body()
            self._connection.end_body()


class Listener(Protocol):
    """The server, as its connections use it."""

    def add(self, connection: Connection) -> None:
        """The connection waits for its first request."""

    def start_request(self, connection: Connection) -> None:
        """The headers of a request have arrived."""

    def serve(self, connection: Connection, exchange: HttpExchange) -> None:
        """Runs the application for a request, and reports its end to the connection."""

    def end_request(self, connection: Connection) -> None:
        """The connection waits for another request."""

    def forget(self, connection: Connection) -> None:
        """The connection has ended."""

    def flush_soon(self, connection: Connection) -> None:
        """Calls `flush` at the end of the event loop's turn."""


class Connection(asyncio.Protocol):
    """Serves its requests one after the other, and counts what they keep in memory.

    A client that ends its direction has closed the connection.
    """

    transport: asyncio.Transport

    def __init__(self, bounds: HttpBounds, server: Listener) -> None:
        # The client's host, and the URIs in its certificate.
        self.caller, self.peer_names = "", tuple[bytes, ...]()
        self._server = server
        # Whether the client must read before more is written.
        self.write_paused = False
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser(self)
        # Those without a whole response. The first is served.
        self._exchanges: deque[HttpExchange] = deque()
        self._timer: asyncio.TimerHandle | None = None
        # Sent after the responses to earlier requests. Nothing more is read.
        self._refusal: HTTPStatus | None = None
        # Whether no request has arrived yet.
        self._new = True
        self._grpc: Http2Refusal | None = None
        self._unsent = b""
        self._writable = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.peer_names = _subject_names(transport.get_extra_info("peercert"))
        self.caller = host_of((transport.get_extra_info("peername") or ("unknown",))[0])
        self._server.add(self)
        self._restart_timer(self._bounds.head_wait_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._restart_timer(None)
        UNREAD_INPUT.release(self)
        self._server.forget(self)
        exchanges = tuple(self._exchanges)
        # Each refers to this object, which is freed now, and not by a later garbage collection.
        self._exchanges.clear()
        self._parser.close()
        for exchange in exchanges:
            exchange.disconnect()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._refusal is not None:
            return
        if self._new and (self._grpc is not None or data.startswith(PREFACE)):
            self._refuse_grpc(data)
            return
        try:
            self._parser.feed(data)
        except Refused as refused:
            self._refuse_next(refused.status)
            return
        if self._parser.in_head and self._timer is None:
            self._restart_timer(self._bounds.head_wait_s)
        self.count_input()

    def _refuse_grpc(self, data: bytes) -> None:
        self._grpc = self._grpc or Http2Refusal()
        try:
            self.write(self._grpc.feed(data))
        except ValueError:
            self.transport.abort()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._writable.set()

    async def until_writable(self) -> None:
        """See `Client`."""
        while self.write_paused:
            await self._writable.wait()

    def write(self, data: bytes) -> None:
        """See `Client`."""
        if self._unsent:
            self._unsent += data
        else:
            self._unsent = data
            self._server.flush_soon(self)
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
            self._restart_timer(None)

    def start_request(self, exchange: HttpExchange) -> None:
        """The headers of a request have arrived. May raise Refused."""
        if len(self._exchanges) > PIPELINED_MAX:
            raise Refused(HTTPStatus.TOO_MANY_REQUESTS)
        self._new = False
        self._restart_timer(None)
        self._server.start_request(self)
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self._server.serve(self, exchange)

    def end_body(self) -> None:
        """The newest request is complete."""
        if not self._exchanges:
            self._restart_timer(self._bounds.idle_s)

    def end_response(self, data: bytes, *, keeps_alive: bool) -> None:
        """See `Client`."""
        self.write(data)
        if self.transport.is_closing():
            return
        self._exchanges.popleft()
        if not keeps_alive:
            self.close()
            return
        self.count_input()
        if self._exchanges:
            self._server.serve(self, self._exchanges[0])
            return
        if self._refusal is not None:
            self._refuse(self._refusal)
            return
        self._server.end_request(self)
        if self._parser.in_body:
            self._restart_timer(self._bounds.body_pause_s)
        elif not self._parser.in_head:
            self._restart_timer(self._bounds.idle_s)

    def end_serving(self, exchange: HttpExchange) -> None:
        """The application has ended, for this request."""
        if exchange in self._exchanges:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR)

    def count_input(self) -> None:
        """See `Client`."""
        if self.transport.is_closing():
            return
        held = sum([exchange.count_body() for exchange in self._exchanges])
        waiting = max(0, len(self._exchanges) - 1)
        # While it reads, it notices that the client has gone.
        if waiting >= PIPELINED_MAX or held > _UNREAD_MAX or self._refusal is not None:
            self.transport.pause_reading()
        elif not self.transport.is_reading():
            self.transport.resume_reading()
        held += self._parser.head_bytes + waiting * _WAITING_REQUEST_BYTES
        if held >= _COUNTED_BYTES:
            UNREAD_INPUT.hold(self, held)
        else:
            UNREAD_INPUT.release(self)

    def end_input(self) -> None:
        """Refuses the request, so that others have its memory."""
        self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)

    def _refuse_next(self, status: HTTPStatus) -> None:
        """Refuses the request that arrives, after the responses to earlier ones."""
        if self._parser.in_body or not self._exchanges:
            self._refuse(status)
            return
        self._refusal = status
        self._restart_timer(None)
        self.count_input()

    def _refuse(self, status: HTTPStatus) -> None:
        """Closes the connection, with this status unless that would be a part of another response."""
        if self.transport.is_closing():
            return
        if len(self._exchanges) > 1 or any(exchange.started for exchange in self._exchanges):
            self.transport.abort()
        else:
            self.write(refusal_of(status))
            self.close()

    def _restart_timer(self, wait_s: float | None) -> None:
        """Calls `_end_wait` after this time. None: never."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if wait_s is None else self._loop.call_later(wait_s, self._end_wait)

    def _end_wait(self) -> None:
        self._timer = None
        if self._parser.in_head:
            self._refuse_next(HTTPStatus.REQUEST_TIMEOUT)
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
