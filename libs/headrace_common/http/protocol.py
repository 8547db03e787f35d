"""One HTTP connection within bounds."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final, Protocol

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from headrace_common.callers.bounds import host_of
from headrace_common.http.bounds import (
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    PIPELINED_MAX,
    UNREAD_INPUT,
    HttpBounds,
)

PEER_NAMES_EXTENSION: Final = "headrace_peer_names"
"""The URIs in the client's certificate, as bytes, among the extensions of an ASGI scope."""
BODY_TAKEN_EXTENSION: Final = "headrace_body_taken"
"""A function that a handler calls after `receive`: the bytes of the body are its own from then on."""

# A chunk of one byte takes six. Other bytes around a body, such as trailers, are few.
_FRAMING_PER_BODY_BYTE: Final = 8
# Less than this is not worth its counting: a connection has no more, and connections are bounded.
_COUNTED_BYTES: Final = 4_096
# What a request that waits takes beside its body: its headers and objects of Python.
_WAITING_REQUEST_BYTES: Final = 8_192


class Connections(Protocol):
    """The listener, as its connections use it."""

    def add(self, connection: BoundedProtocol) -> None:
        """The connection waits for its first request."""

    def start_request(self, connection: BoundedProtocol) -> None:
        """The headers of a request have arrived."""

    def end_request(self, connection: BoundedProtocol) -> None:
        """The connection waits for another request."""

    def forget(self, connection: BoundedProtocol) -> None:
        """The connection has ended."""


class _Refused(Exception):
    """Stops the parser."""


class BoundedProtocol(HttpToolsProtocol):
    """Refuses requests beyond the bounds, and ignores upgrades such as that to h2c (RFC 9110, 7.8)."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        bounds: HttpBounds,
        listener: Connections,
    ) -> None:
        super().__init__(config, state, {})
        self.caller = ""
        self._bounds = bounds
        self._listener = listener
        self._timer: asyncio.TimerHandle | None = None
        self._peer_names: tuple[bytes, ...] = ()
        # What the parser must still read of the bytes that arrived.
        self._pieces: tuple[bytes | memoryview, ...] = ()
        self._in_head = False
        self._in_body = False
        # Whether a request has ended in the piece that the parser reads.
        self._ended_in_piece = False
        self._message_bytes = 0
        self._body_bytes = 0
        self._holds_input = False
        self._refusal = HTTPStatus.BAD_REQUEST

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._peer_names = _subject_names(transport.get_extra_info("peercert"))
        self.caller = host_of((self.client or ("unknown", 0))[0])
        self._listener.add(self)
        self._start_timer(self._bounds.head_wait_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._release_input()
        self._listener.forget(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        # Each scope refers to this object. Without its scopes it is freed now, and not by a later garbage collection.
        self.pipeline.clear()
        self.scope = self.cycle = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._pieces = (data,)
        while self._pieces and not self.transport.is_closing():
            piece, self._pieces = memoryview(self._pieces[0]), self._pieces[1:]
            fitting = HEAD_BYTES_MAX - self._message_bytes if self._in_head else HEAD_BYTES_MAX
            if len(piece) > fitting:
                self._pieces = (piece[fitting:], *self._pieces)
                piece = piece[:fitting]
            self._parse(piece)
        if not self.transport.is_closing():
            self._hold_input()

    def _parse(self, piece: memoryview) -> None:
        self._ended_in_piece = False
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as stopped:
            self._ignore_upgrade(piece[stopped.args[0] :])
            return
        except httptools.HttpParserError:
            self._refuse(self._refusal)
            return
        if self._in_head or self._in_body:
            self._count(len(piece))

    def _count(self, size: int) -> None:
        """Counts a piece that does not end the request."""
        if self._ended_in_piece:
            # The piece has other requests too.
            headers = sum(len(name) + len(value) for name, value in self.headers)
            self._message_bytes = self._body_bytes + len(self.url) + headers
        else:
            self._message_bytes += size
        if self._in_head:
            too_long = self._message_bytes >= HEAD_BYTES_MAX
        else:
            framing = _FRAMING_PER_BODY_BYTE * self._body_bytes
            too_long = self._message_bytes > 2 * HEAD_BYTES_MAX + framing
        if too_long or len(self.headers) > HEADERS_MAX:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self._in_head and self._timer is None:
            self._start_timer(self._bounds.head_wait_s)

    def _hold_input(self) -> None:
        """States what this connection keeps in memory, other than what a handler has received."""
        held = self._message_bytes if self._in_head else 0
        newest = self._unanswered()
        if newest is not None:
            held += len(newest.body)
            for waiting, _ in self.pipeline:
                held += _WAITING_REQUEST_BYTES
                if waiting is not newest:
                    held += len(waiting.body)
        if held >= _COUNTED_BYTES:
            self._holds_input = True
            UNREAD_INPUT.hold(self, held)
        elif self._holds_input:
            self._release_input()

    def _unanswered(self) -> RequestResponseCycle | None:
        """The newest request, while its response is not complete."""
        newest: Any = self.cycle
        return None if newest is None or newest.response_complete else newest

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
        newest = self._unanswered()
        if newest is None or not (self.pipeline or newest.response_started):
            self.transport.write(refusal_of(status))
            self.transport.close()
        else:
            self.transport.abort()

    def _offers_upgrade(self) -> bool:
        return self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)

    def _ignore_upgrade(self, rest: memoryview) -> None:
        """Lets the parser, which stopped at the end of the headers, read the request without the offer and with its
        body.
        """
        if not self._offers_upgrade():
            return
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self._pieces = (b"\r\n".join((*lines, b"", b"")), rest, *self._pieces)

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()
        self._in_head = True
        self._message_bytes = self._body_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._offers_upgrade():
            return
        if len(self.headers) > HEADERS_MAX:
            self._refusal = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise _Refused
        if len(self.pipeline) >= PIPELINED_MAX:
            self._refusal = HTTPStatus.TOO_MANY_REQUESTS
            raise _Refused
        self._stop_timer()
        self._in_body = True
        self._listener.start_request(self)
        super().on_headers_complete()
        # The application starts in a later turn of the event loop.
        extensions: Any = {
            PEER_NAMES_EXTENSION: self._peer_names,
            BODY_TAKEN_EXTENSION: self._hold_input,
        }
        self.scope["extensions"] = extensions

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade():
            return
        self._in_body = False
        self._ended_in_piece = True
        if self.cycle.response_complete:
            # The rest of a body that no handler wanted.
            self._stop_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        newest: Any = self.cycle
        if newest is not None and newest.response_complete:
            # No handler reads what it has left.
            newest.body.clear()
        self._hold_input()
        if self.transport.is_closing() or not self.cycle.response_complete:
            return
        self._listener.end_request(self)
        if self._in_body:
            self._unset_keepalive_if_required()
            self._start_timer(self._bounds.body_pause_s)

    def _start_timer(self, wait_s: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(wait_s, self._end_wait)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_wait(self) -> None:
        self._timer = None
        if self._in_head:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
        else:
            self.transport.abort()


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
    HTTPStatus.SERVICE_UNAVAILABLE: "too many clients send requests at the same time; try again later",
}


def _subject_names(certificate: Any) -> tuple[bytes, ...]:
    """The URIs in a verified client certificate, as gRPC has them."""
    names = (certificate or {}).get("subjectAltName", ())
    return tuple(value.encode("ascii", "replace") for kind, value in names if kind == "URI")
