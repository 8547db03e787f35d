"""One HTTP request over ASGI: reading its body within bounds, and writing its response."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any, Protocol, TypeAlias, TypeVar

from headrace_common.callers.hosts import host_of
from headrace_common.errors import Cancelled, HeadraceError
from headrace_frontend.openai.errors import (
    OPENAI_ERRORS,
    ErrorForm,
    HttpError,
    headers_of,
    status_of,
)

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Result = TypeVar("Result")

DIRECT_EXTENSION = "headrace_direct"
"""The name of the server's DirectWriter among the extensions of an ASGI scope."""
PEER_NAMES_EXTENSION = "headrace_peer_names"
"""The URIs in the client's certificate, as bytes, among the extensions of an ASGI scope."""

_NO_HEADER_CHARACTER = re.compile(r"[^ -~\x80-\xff]")
BODY_WAIT_S = 30.0
"""Time in which a client must send its request."""


class DirectWriter(Protocol):
    """Sends the parts of a response in chunks at once. False, and nothing is sent, when a part would have to wait."""

    @property
    def writable(self) -> bool:
        """Whether the client reads, and the response has no end yet."""
        ...

    def take_body(self) -> bytes | None:
        """The request's body, if all of it has arrived."""
        ...

    def start(self, headers: bytes, data: bytes) -> bool:
        """Sends status 200, the lines of these headers, and the first part of the body."""
        ...

    def write(self, data: bytes) -> bool:
        """Sends a part of the body. False before the start, too."""
        ...

    def finish(self, data: bytes) -> bool:
        """Sends the last part of the body, and ends it. False before the start, too."""
        ...

    def when_lost(self, call: Callable[[], None] | None) -> bool:
        """Calls `call` when the client closes the connection. False when it has done so."""
        ...


class HttpExchange:
    """One request and its response."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, errors: ErrorForm = OPENAI_ERRORS
    ) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[str, str] = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        self.request_id = _NO_HEADER_CHARACTER.sub(
            "", self.headers.get("x-request-id", "")
        ) or secrets.token_hex(12)
        """The client's X-Request-Id, or a new one."""
        # Taken out of the scope, to which it refers: a cycle would be garbage only for the collector.
        self._direct: DirectWriter | None = scope.get("extensions", {}).pop(DIRECT_EXTENSION, None)
        self.host = host_of((scope.get("client") or ("unknown", 0))[0])
        """The client's host."""
        self._receive = receive
        self._send = send
        self._errors = errors
        self._response_headers: dict[str, str] = {}
        self.started = False
        """Whether the response's status is sent."""

    def add_header(self, name: str, value: str) -> None:
        """Sends a header with whatever becomes the response."""
        self._response_headers[name] = value

    async def read_json(self, bytes_max: int) -> bytes:
        """The body of a JSON request. Raises HttpError before it receives more than `bytes_max` bytes."""
        self._check_headers(bytes_max)
        whole = self._direct.take_body() if self._direct is not None else None
        if whole is not None:
            if len(whole) > bytes_max:
                raise _too_large(bytes_max)
            return whole
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_WAIT_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Cancelled("the client closed the connection")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > bytes_max:
                        raise _too_large(bytes_max)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise HttpError(
                408,
                "body_timeout",
                f"the body did not arrive within {BODY_WAIT_S:g} s; send it at once",
            ) from None

    def _check_headers(self, bytes_max: int) -> None:
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        # A page of another site can make a browser send other types, but not this one.
        if media_type != "application/json":
            raise HttpError(
                415, "media_type", "send the body as JSON, with content-type: application/json"
            )
        if self.headers.get("content-encoding", "identity") != "identity":
            raise HttpError(415, "content_encoding", "send the body without content-encoding")
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > bytes_max:
            raise _too_large(bytes_max)

    async def run_while_connected(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, which is cancelled when the client closes the connection. Raises Cancelled then."""
        task = asyncio.current_task()
        assert task is not None
        disconnected = False

        def end() -> None:
            nonlocal disconnected
            disconnected = True
            task.cancel()

        stop_watching = self._watch(end)
        if stop_watching is None:
            work.close()
            raise Cancelled("the client closed the connection")
        try:
            return await work
        except asyncio.CancelledError:
            if not disconnected:
                raise
            task.uncancel()
            raise Cancelled("the client closed the connection") from None
        finally:
            stop_watching()

    def _watch(self, end: Callable[[], None]) -> Callable[[], object] | None:
        """Calls `end` once the client closes the connection, until the returned function is called.

        None when the client has closed it.
        """
        direct = self._direct
        if direct is None:
            return asyncio.create_task(self._call_when_disconnected(end)).cancel
        return (lambda: direct.when_lost(None)) if direct.when_lost(end) else None

    async def _call_when_disconnected(self, end: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        end()

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Sends the status and the headers."""
        self.started = True
        headers = {**headers, **self._response_headers}
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes) -> None:
        """Sends a part of the body. Waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    @property
    def writable(self) -> bool:
        """Whether a part of the response can be sent without an event loop's turn."""
        return self._direct is not None and self._direct.writable

    def start_now(self, headers: bytes, data: bytes) -> bool:
        """Sends status 200, the lines of these headers and the first part of the body, if that needs no wait."""
        more = "".join(f"{name}: {value}\r\n" for name, value in self._response_headers.items())
        lines = headers + more.encode("latin-1")
        if self.started or self._direct is None or not self._direct.start(lines, data):
            return False
        self.started = True
        return True

    def write_now(self, data: bytes) -> bool:
        """As `write`, without an event loop's turn. False, and nothing is sent, when the client does not read."""
        return self.started and self._direct is not None and self._direct.write(data)

    def finish_now(self, data: bytes) -> bool:
        """As `finish`, without an event loop's turn."""
        return self.started and self._direct is not None and self._direct.finish(data)

    async def finish(self, data: bytes = b"") -> None:
        """Sends the last part of the body, and ends it."""
        await self._send({"type": "http.response.body", "body": data})

    async def respond(
        self, status: int, data: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends a whole JSON response."""
        await self.start(
            status,
            {
                "content-type": "application/json",
                "content-length": str(len(data)),
                **(headers or {}),
            },
        )
        await self._send({"type": "http.response.body", "body": data})

    async def respond_object(self, value: Any) -> None:
        """Sends a value as JSON, with status 200."""
        await self.respond(200, json.dumps(value).encode())

    async def respond_error(self, error: HeadraceError | HttpError) -> None:
        """Sends an error: as the response, or as the last event of a stream that has started."""
        if self.started:
            await self.write(self._errors.event(error))
            await self.finish()
        else:
            await self.respond(status_of(error), self._errors.whole(error), headers_of(error))


def _too_large(bytes_max: int) -> HttpError:
    return HttpError(
        413, "body_too_large", f"the body has more than {bytes_max} bytes; shorten the prompt"
    )
