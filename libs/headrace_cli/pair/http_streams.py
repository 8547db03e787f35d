"""HTTP/1.1 for a proxy: one request per connection, request bodies of known length."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from headrace_common.errors import ConfigError, HeadraceError, InvalidRequest, WorkerGone

HEAD_BYTES_MAX = 64 * 1024
BODY_BYTES_MAX = 64 * 1024 * 1024
CHUNK_BYTES = 64 * 1024
REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
# Headers of one connection, which a proxy does not forward.
HOP_HEADERS = frozenset(
    {"connection", "content-length", "expect", "host", "keep-alive", "transfer-encoding", "upgrade"}
)


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an HTTP server."""

    host: str
    port: int

    @classmethod
    def of_url(cls, url: str) -> Address:
        """Parses "http://host:port". Raises ConfigError."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme != "http" or not parts.hostname or not port or parts.path not in ("", "/"):
            raise ConfigError(f"{url!r} is wrong: write it as http://host:port")
        return cls(parts.hostname, port)

    def __str__(self) -> str:
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request with its complete body."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    def with_json(self, body: Mapping[str, Any]) -> HttpRequest:
        """The same request with another body."""
        return HttpRequest(self.method, self.target, self.headers, json.dumps(body).encode())

    def encode(self, host: str) -> bytes:
        """The request as bytes, with "Connection: close"."""
        lines = [f"{self.method} {self.target} HTTP/1.1", f"Host: {host}"]
        lines += [f"{k}: {v}" for k, v in self.headers if k.lower() not in HOP_HEADERS]
        lines += [f"Content-Length: {len(self.body)}", "Connection: close", "", ""]
        return "\r\n".join(lines).encode("latin-1") + self.body


async def read_http_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> HttpRequest | None:
    """Reads one request. None when the client disconnects first. Raises InvalidRequest."""
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, headers = _parse_head(head)
            named = {name.lower(): value for name, value in headers}
            length = named.get("content-length", "0")
            if "transfer-encoding" in named:
                raise InvalidRequest({"Transfer-Encoding": "send Content-Length instead"})
            if not length.isdecimal() or int(length) > BODY_BYTES_MAX:
                raise InvalidRequest({"Content-Length": f"must be at most {BODY_BYTES_MAX}"})
            if named.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return HttpRequest(method, target, headers, await reader.readexactly(int(length)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except asyncio.LimitOverrunError:
        raise InvalidRequest({"headers": f"must be at most {HEAD_BYTES_MAX} bytes"}) from None
    except TimeoutError:
        raise InvalidRequest({"request": f"took more than {REQUEST_TIMEOUT_S:g} s"}) from None


def _parse_head(head: bytes) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    first, *rest = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    words = first.split(" ")
    pairs = [line.partition(":") for line in rest]
    if len(words) != 3 or not all(colon for _, colon, _ in pairs):
        raise InvalidRequest({"request": "is not HTTP/1.1"})
    return words[0], words[1], tuple((name.strip(), value.strip()) for name, _, value in pairs)


class Upstream:
    """One request to a server. An early `close` makes the server cancel it."""

    def __init__(self, address: Address, request: HttpRequest) -> None:
        self._address = address
        self._request = request
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> bytes:
        """Sends the request and returns the head and first bytes of the response. Raises WorkerGone."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                self._reader, self._writer = await asyncio.open_connection(
                    self._address.host, self._address.port, limit=HEAD_BYTES_MAX
                )
            self._writer.write(self._request.encode(f"{self._address.host}:{self._address.port}"))
            await self._writer.drain()
            head = await self._reader.readuntil(b"\r\n\r\n")
            return head + await self._reader.read(CHUNK_BYTES)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as exc:
            raise self._gone(exc) from exc

    async def read(self) -> bytes:
        """The next bytes of the response; empty at the end. Raises WorkerGone."""
        assert self._reader is not None
        try:
            return await self._reader.read(CHUNK_BYTES)
        except OSError as exc:
            raise self._gone(exc) from exc

    def close(self) -> None:
        """Closes the connection."""
        if self._writer is not None:
            self._writer.close()

    def _gone(self, exc: Exception) -> WorkerGone:
        why = str(exc) or type(exc).__name__
        return WorkerGone(
            f"{self._address} does not answer: {why}", metadata={"server": str(self._address)}
        )


def status_of(response: bytes) -> int:
    """The status in the first bytes of a response; 0 when they have none."""
    words = response.split(b"\r\n", 1)[0].split(b" ")
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


def error_response(error: HeadraceError, status: HTTPStatus) -> bytes:
    """A response with the error in the format of OpenAI's API."""
    content = {"error": {"message": error.detail, "type": error.reason, "code": int(status)}}
    body = json.dumps(content).encode()
    head = (
        f"HTTP/1.1 {int(status)} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
