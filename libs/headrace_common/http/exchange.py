"""One HTTP request: reading its body within bounds, and writing its response."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import time
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final, Protocol

from headrace_common.callers.bounds import COUNTED_BYTES, RequestInput, current_input
from headrace_common.errors import Cancelled
from headrace_common.http.bounds import BODY_BYTES_PER_S, BODY_PAUSE_S, BODY_WAIT_S

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_NO_HEADERS: Final[Mapping[str, str]] = {}
_NO_HEADER_CHARACTER: Final = re.compile(r"[^ -~\x80-\xff]")
_STATUS_LINES: Final = {one.value: f"HTTP/1.1 {one.value} {one.phrase}" for one in HTTPStatus}


class HttpError(Exception):
    """A request that is wrong as HTTP. `code` is a word for programs."""

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


class Client(Protocol):
    """The connection to a client, as an exchange uses it."""

    caller: str
    peer_names: tuple[bytes, ...]
    write_paused: bool

    def write(self, data: bytes) -> None:
        """Sends data, together with what else is written in this turn of the event loop."""

    async def until_writable(self) -> None:
        """Waits while the client must read."""

    def end_response(self, data: bytes, *, keeps_alive: bool) -> None:
        """Sends the end of the response to the oldest request. The next one is served."""

    def count_input(self) -> None:
        """Counts what the client's requests keep in memory. Reads on, or not, by what no handler reads."""


class HttpExchange:
    """One request and its response."""

    def __init__(
        self,
        connection: Client,
        method: str,
        path: str,
        headers: dict[str, str],
        *,
        chunks: bool,
        keeps_alive: bool,
        query: str = "",
    ) -> None:
        """`path` is decoded, and `query` is not. `headers` have lower-case names. `chunks`: the client accepts them."""
        self.method, self.path, self.query, self.headers = method, path, query, headers
        # The client's X-Request-Id, or a new one.
        given = headers.get("x-request-id")
        self.request_id = (given and _NO_HEADER_CHARACTER.sub("", given)) or os.urandom(12).hex()
        # The client's host.
        self.host = connection.caller
        # The URIs in the client's certificate.
        self.peer_names = connection.peer_names
        # Whether the response's status is sent, and how many parts of its body.
        self.started = False
        self.parts = 0
        self._connection = connection
        self._keeps_alive = keeps_alive
        self._chunked = chunks and method != "HEAD"
        self._response_headers: dict[str, str] = {}
        self._ended = self._disconnected = False
        self._serving: asyncio.Task[Any] | None = None
        # What has arrived of the body. A list of its parts could take many times its bytes.
        self._body = bytearray()
        self._body_complete = False
        # While a handler reads the body.
        self._input: RequestInput | None = None
        self._arrived = asyncio.Event()

    def add_header(self, name: str, value: str) -> None:
        """Sends a header with whatever becomes the response."""
        self._response_headers[name] = value

    def close_after(self) -> None:
        """Ends the connection after the response."""
        self._keeps_alive = False

    def add_body(self, data: bytes) -> None:
        """A part of the body has arrived. Nothing wants the rest once there is a response."""
        if not self._ended:
            self._body += data
            self._arrived.set()

    def end_body(self) -> None:
        """The body is complete."""
        self._body_complete = True
        self._arrived.set()

    def disconnect(self) -> None:
        """The client has closed the connection."""
        self._disconnected = True
        self._arrived.set()
        if self._serving is not None and not self._ended:
            self._serving.cancel()

    def count_body(self) -> int:
        """Counts what a handler reads of the body for its caller. The number of bytes that none reads yet."""
        if self._input is None:
            return len(self._body)
        if len(self._body) >= COUNTED_BYTES or not self._body_complete:
            self._input.set_size(len(self._body))
        return 0

    async def json_body(self, bytes_max: int) -> bytes:
        """The body of a JSON request. It counts as the current input.

        Raises HttpError before it receives more than `bytes_max` bytes, and QueueFull as RequestInput does.
        """
        _check_json(self.headers, bytes_max)
        self._input = current_input()
        assert self._input is not None, "a body is an input of its caller"
        try:
            self._connection.count_input()
            if len(self._body) < COUNTED_BYTES and self._has_body(bytes_max):
                return bytes(self._body)
            async with asyncio.timeout(BODY_WAIT_S) as clock:
                return await self._read(bytes_max, clock)
        except TimeoutError:
            raise _late_body() from None
        finally:
            self._input = None
            self._body.clear()

    async def _read(self, bytes_max: int, clock: asyncio.Timeout) -> bytes:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + BODY_WAIT_S
        if not self._body_complete and self.headers.get("expect", "").lower() == "100-continue":
            self._connection.write(_CONTINUE)
        while not self._has_body(bytes_max):
            if self._body:
                size_s = len(self._body) / BODY_BYTES_PER_S
                clock.reschedule(min(end_s + size_s, loop.time() + BODY_PAUSE_S))
            self._arrived.clear()
            await self._arrived.wait()
        clock.reschedule(None)
        data, self._body = bytes(self._body), bytearray()
        return data

    async def body_part(self) -> bytes:
        """The next part of a body of any type, and at its end none. Nothing more is read meanwhile.

        Raises HttpError for a body that pauses, and Cancelled.
        """
        if not self._arrived.is_set() and "expect" in self.headers:
            self._connection.write(_CONTINUE)
        try:
            async with asyncio.timeout(BODY_PAUSE_S):
                while not (self._body or self._body_complete):
                    self._arrived.clear()
                    self._connection.count_input()
                    await self._arrived.wait()
                    if self._disconnected:
                        raise Cancelled("the client closed the connection")
        except TimeoutError:
            raise _late_body() from None
        data, self._body = bytes(self._body), bytearray()
        return data

    def _has_body(self, bytes_max: int) -> bool:
        """Whether the body is complete. Raises HttpError beyond its bounds, and Cancelled."""
        if self._disconnected:
            raise Cancelled("the client closed the connection")
        if len(self._body) > bytes_max:
            raise too_large(bytes_max)
        return self._body_complete

    def end_with_client(self) -> None:
        """Cancels the current task when the client closes the connection before the end of the response."""
        self._serving = asyncio.current_task()
        if self._serving is not None and self._disconnected:
            self._serving.cancel()

    @property
    def writable(self) -> bool:
        """Whether the response has no end yet, and nothing waits for the client to read."""
        return not (self._ended or self._connection.write_paused)

    def write_now(self, data: bytes, headers: Mapping[str, str] = _NO_HEADERS) -> None:
        """As `write`, without an event loop's turn. Only while the response is `writable`."""
        self._connection.write(self._part(data, headers))

    async def write(self, data: bytes, headers: Mapping[str, str] = _NO_HEADERS) -> None:
        """Sends a part of the body, the first one after status 200 and `headers`.

        Waits while the client does not read.
        """
        await self._connection.until_writable()
        self._connection.write(self._part(data, headers))

    async def finish(self, data: bytes = b"", headers: Mapping[str, str] = _NO_HEADERS) -> None:
        """As `write`, for the last part of the body."""
        await self._end(self._part(data, headers) + (b"0\r\n\r\n" if self._chunked else b""))

    def _head(self, status: int, headers: Mapping[str, str], *, chunked: bool) -> bytes:
        sent = {"date": _date(int(time.time())), **headers, **self._response_headers}
        if chunked:
            sent["transfer-encoding"] = "chunked"
        if not self._keeps_alive:
            sent["connection"] = "close"
        if _NO_HEADER_CHARACTER.search("".join(sent.values())):
            raise ValueError("a header of the response has a control character")
        self.started = True
        lines = [_STATUS_LINES.get(status, f"HTTP/1.1 {status} ")]
        lines += [f"{name}: {value}" for name, value in sent.items()]
        return "\r\n".join((*lines, "", "")).encode("latin-1")

    def _part(self, data: bytes, headers: Mapping[str, str]) -> bytes:
        self.parts += 1
        head = b"" if self.started else self._head(200, headers, chunked=self._chunked)
        if self._chunked and data:
            return b"%b%x\r\n%b\r\n" % (head, len(data), data)
        return head if self.method == "HEAD" else head + data

    async def respond(
        self, status: int, data: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends a whole JSON response."""
        named = {"content-type": "application/json", "content-length": str(len(data))}
        head = self._head(status, {**named, **(headers or {})}, chunked=False)
        await self._end(head if self.method == "HEAD" else head + data)

    async def respond_object(self, value: Any) -> None:
        """Sends a value as JSON, with status 200."""
        await self.respond(200, json.dumps(value).encode())

    async def _end(self, data: bytes) -> None:
        """Sends the end of the response."""
        if self._ended:
            raise RuntimeError("the response has ended")
        self._ended = True
        await self._connection.until_writable()
        self._body.clear()
        self._connection.end_response(data, keeps_alive=self._keeps_alive)


@functools.lru_cache(maxsize=1)
def _date(unix_s: int) -> str:
    return formatdate(unix_s, usegmt=True)


def _check_json(headers: Mapping[str, str], bytes_max: int) -> None:
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    # A page of another site can make a browser send other types, but not this one.
    if media_type != "application/json":
        raise HttpError(
            415, "media_type", "send the body as JSON, with content-type: application/json"
        )
    if headers.get("content-encoding", "identity") != "identity":
        raise HttpError(415, "content_encoding", "send the body without content-encoding")
    length = headers.get("content-length", "")
    if length.isdecimal() and (len(length) > _LENGTH_DIGITS_MAX or int(length) > bytes_max):
        raise too_large(bytes_max)


_LENGTH_DIGITS_MAX: Final = 18


def _late_body() -> HttpError:
    return HttpError(
        408,
        "body_timeout",
        f"the body did not arrive within {BODY_WAIT_S:g} s, or paused for {BODY_PAUSE_S:g} s; send it at once",
    )


def too_large(bytes_max: int) -> HttpError:
    """The error of a body with more than `bytes_max` bytes."""
    return HttpError(
        413, "body_too_large", f"the body has more than {bytes_max} bytes; shorten the prompt"
    )
