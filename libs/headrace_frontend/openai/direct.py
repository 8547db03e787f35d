"""The writes of one response, past ASGI: each is one call, without a coroutine and a message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

_OK: Final = 200
_CHUNKED: Final = b"transfer-encoding: chunked\r\n\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"


class JoinedHead:
    """A transport that sends the head of a response with the first part of its body. The app sends both in one turn."""

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head: bytes | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Sends `data`, unless it is the head."""
        if self._head is None:
            if self._cycle.response_started:
                self._head = data
            else:
                self._transport.write(data)
            return
        if self._head:
            data, self._head = self._head + data, b""
            # Nothing is left to join, and `cycle` would be garbage only for the collector.
            self._cycle.transport = self._transport
        self._transport.write(data)

    def close(self) -> None:
        """Closes the connection, after what was written."""
        if self._head:
            self._transport.write(self._head)
        self._transport.close()


class DirectResponse:
    """Does what uvicorn's `send` does for a response in chunks. See exchange.DirectWriter.

    `cycle` is uvicorn's object for one request and its response.
    """

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self._on_lost: Callable[[], None] | None = None
        if cycle.scope["method"] != "HEAD":
            cycle.transport = JoinedHead(cycle)

    @property
    def writable(self) -> bool:
        """Whether the client reads, and a part of the body may follow."""
        cycle = self._cycle
        return not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)

    def take_body(self) -> bytes | None:
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        self._flow.resume_reading()
        return body

    def start(self, headers: bytes, data: bytes) -> bool:
        cycle = self._cycle
        if not self.writable or cycle.response_started or cycle.scope["method"] == "HEAD":
            return False
        cycle.response_started = cycle.chunked_encoding = True
        cycle.waiting_for_100_continue = False
        head = [STATUS_LINE[_OK]]
        for name, value in cycle.default_headers:
            head += (name, b": ", value, b"\r\n")
        head.append(headers)
        if not cycle.keep_alive:
            head.append(b"connection: close\r\n")
        head += (_CHUNKED, _chunk(data))
        # Nothing is left for JoinedHead.
        cycle.transport = self._transport
        self._transport.write(b"".join(head))
        return True

    def write(self, data: bytes) -> bool:
        cycle = self._cycle
        if not data or not cycle.chunked_encoding or not self.writable:
            return False
        cycle.transport.write(_chunk(data))
        return True

    def finish(self, data: bytes) -> bool:
        cycle = self._cycle
        if not cycle.chunked_encoding or not self.writable:
            return False
        cycle.transport.write(_chunk(data) + _LAST_CHUNK)
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True

    def when_lost(self, call: Callable[[], None] | None) -> bool:
        if self._cycle.disconnected:
            return False
        self._on_lost = call
        return True

    def connection_lost(self) -> None:
        """The client has closed the connection."""
        call, self._on_lost = self._on_lost, None
        if call is not None:
            call()


def _chunk(data: bytes) -> bytes:
    # A chunk without content would end the body.
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
