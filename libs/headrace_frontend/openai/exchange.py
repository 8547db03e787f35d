"""One HTTP request over ASGI: reading its body within bounds, and writing its response."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping
from typing import Any, TypeVar

from headrace_common.callers.bounds import host_of
from headrace_common.errors import Cancelled, HeadraceError
from headrace_common.http.bounds import BODY_BYTES_PER_S, BODY_PAUSE_S, BODY_WAIT_S, READ_BODIES
from headrace_common.http.protocol import BODY_TAKEN_EXTENSION
from headrace_common.http.server import Message, Receive, Scope, Send
from headrace_common.rpc.status import reported_error
from headrace_frontend.openai.errors import (
    OPENAI_ERRORS,
    ErrorForm,
    HttpError,
    headers_of,
    status_of,
)

Result = TypeVar("Result")

# A whole body below it is not counted: calls in flight bound them.
_COUNTED_BYTES = 65_536
_NO_HEADER_CHARACTER = re.compile(r"[^ -~\x80-\xff]")


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
        self.host = host_of((scope.get("client") or ("unknown", 0))[0])
        """The client's host."""
        self.caller = self.host
        """Shares the memory for bodies with its other requests: a tenant, or a host until `set_caller`."""
        self._receive = receive
        self._body_taken = scope.get("extensions", {}).get(BODY_TAKEN_EXTENSION, _take_nothing)
        self._send = send
        self._errors = errors
        self._response_headers: dict[str, str] = {}
        self.started = False
        """Whether the response's status is sent."""
        self._ended = False
        self._body_clock: asyncio.Timeout | None = None
        self._body_refused = False
        self._sending: asyncio.Task[None] | None = None

    def set_caller(self, caller: str) -> None:
        """States to which caller the request belongs, before its body is read."""
        self.caller = caller

    def add_header(self, name: str, value: str) -> None:
        """Sends a header with whatever becomes the response."""
        self._response_headers[name] = value

    @contextlib.asynccontextmanager
    async def json_body(self, bytes_max: int) -> AsyncIterator[bytes]:
        """The body of a JSON request, which the block parses.

        Raises HttpError before it receives more than `bytes_max` bytes, and when the memory for bodies is in use.
        """
        self._check_headers(bytes_max)
        try:
            async with asyncio.timeout(BODY_WAIT_S) as self._body_clock:
                yield await self._read(bytes_max, self._body_clock)
        except TimeoutError:
            raise _memory_in_use() if self._body_refused else _late_body() from None
        finally:
            self._body_clock = None
            READ_BODIES.release(self)

    async def _read(self, bytes_max: int, clock: asyncio.Timeout) -> bytes:
        parts: list[bytes] = []
        size = 0
        loop = asyncio.get_running_loop()
        end_s = loop.time() + BODY_WAIT_S
        while True:
            message = await self._receive()
            self._body_taken()
            if message["type"] == "http.disconnect":
                raise Cancelled("the client closed the connection")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > bytes_max:
                raise _too_large(bytes_max)
            complete = not message.get("more_body", False)
            if size >= _COUNTED_BYTES or not complete:
                READ_BODIES.hold(self, size)
                if self._body_refused:
                    raise _memory_in_use()
            if complete:
                clock.reschedule(None)
                return b"".join(parts)
            clock.reschedule(min(end_s + size / BODY_BYTES_PER_S, loop.time() + BODY_PAUSE_S))

    def end_input(self) -> None:
        """Refuses the request while its body is read, so that others have its memory."""
        self._body_refused = True
        if self._body_clock is not None:
            self._body_clock.reschedule(asyncio.get_running_loop().time())

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

        watcher = asyncio.create_task(self._call_when_disconnected(end))
        try:
            return await work
        except asyncio.CancelledError:
            if not disconnected:
                raise
            task.uncancel()
            raise Cancelled("the client closed the connection") from None
        finally:
            watcher.cancel()

    async def _call_when_disconnected(self, end: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._ended:
            end()

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Sends the status and the headers."""
        self.started = True
        await self._send_after(self._head(status, headers))

    async def write(self, data: bytes) -> None:
        """Sends a part of the body. Waits while the client does not read."""
        await self._send_after({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """Sends the last part of the body, and ends it."""
        self._ended = True
        await self._send_after({"type": "http.response.body", "body": data})

    @property
    def writable(self) -> bool:
        """Whether the response has no end yet, and no message waits for the client to read."""
        return not self._ended and (self._sending is None or self._sending.done())

    def start_now(self, headers: Mapping[str, str], data: bytes) -> bool:
        """Sends status 200, these headers and the first part of the body, without an event loop's turn.

        False, and nothing is sent, when the response is not `writable` or has started.
        """
        if self.started or not self.writable:
            return False
        self.started = True
        body = {"type": "http.response.body", "body": data, "more_body": True}
        self._send_now(self._send_all(self._head(200, headers), body))
        return True

    def write_now(self, data: bytes) -> bool:
        """As `write`, without an event loop's turn. False, and nothing is sent, when the response is not `writable`."""
        if not self.started or not self.writable:
            return False
        self._send_now(self._send({"type": "http.response.body", "body": data, "more_body": True}))
        return True

    def _head(self, status: int, headers: Mapping[str, str]) -> Message:
        headers = {**headers, **self._response_headers}
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": status, "headers": pairs}

    async def _send_after(self, message: Message) -> None:
        """Sends a message after what waits for the client to read."""
        if self._sending is not None:
            await self._sending
        await self._send(message)

    async def _send_all(self, *messages: Message) -> None:
        for message in messages:
            await self._send(message)

    def _send_now(self, sending: Coroutine[Any, Any, None]) -> None:
        """Runs the server's `send` as far as it needs no wait. A task does the rest."""
        try:
            waited = sending.send(None)
        except StopIteration:
            return
        self._sending = asyncio.create_task(_finish(sending, waited))

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
        await self.finish(data)

    async def respond_object(self, value: Any) -> None:
        """Sends a value as JSON, with status 200."""
        await self.respond(200, json.dumps(value).encode())

    async def serve(self, serving: Coroutine[Any, Any, None]) -> None:
        """Awaits what serves the request. Its error becomes the response."""
        try:
            await serving
        except HttpError as error:
            await self.respond_error(error)
        except Exception as error:  # noqa: BLE001 - the outermost frame of a request
            await self.respond_error(reported_error(error, self.path))

    async def respond_error(self, error: HeadraceError | HttpError) -> None:
        """Sends an error: as the response, or as the last event of a stream that has started."""
        if self.started:
            await self.write(self._errors.event(error))
            await self.finish()
        else:
            await self.respond(status_of(error), self._errors.whole(error), headers_of(error))


async def _finish(started: Coroutine[Any, Any, None], waited: Any) -> None:
    await _rest(started, waited)


@types.coroutine
def _rest(started: Coroutine[Any, Any, None], waited: Any) -> Generator[Any, Any, None]:
    """The steps of a coroutine that has started outside of a task, and waits for `waited`."""
    with contextlib.suppress(StopIteration):
        while True:
            yield waited
            waited = started.send(None)


def _take_nothing() -> None:
    pass


def _late_body() -> HttpError:
    return HttpError(
        408,
        "body_timeout",
        f"the body did not arrive within {BODY_WAIT_S:g} s, or paused for {BODY_PAUSE_S:g} s; send it at once",
    )


def _memory_in_use() -> HttpError:
    return HttpError(
        503,
        "bodies_in_memory",
        "other requests use the memory for bodies; send the request again",
        {"retry-after": "1"},
    )


def _too_large(bytes_max: int) -> HttpError:
    return HttpError(
        413, "body_too_large", f"the body has more than {bytes_max} bytes; shorten the prompt"
    )
