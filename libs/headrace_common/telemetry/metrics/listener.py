"""Serves /metrics for Prometheus on `metrics_listen`. Every process can.

A small server of its own: it reads one request for each connection, within bounds, and depends on no HTTP library.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Final

from headrace_common.access.credentials import TlsFiles
from headrace_common.access.key_file import key_digest, key_in, load_keys
from headrace_common.access.tls import server_context
from headrace_common.config import ServiceConfig, split_host_port
from headrace_common.errors import ConfigError
from headrace_common.process.loop_watch import loop_watched
from headrace_common.reloading import ReloadedFiles
from headrace_common.telemetry.metrics.process import Metrics
from headrace_common.telemetry.metrics.prometheus import content_type

_LOG = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 16
"""Open connections. Further ones are closed at once."""
EXCHANGE_S: Final = 10.0
"""Time for the handshake, the request and the answer of a connection."""
HEAD_BYTES_MAX: Final = 8_192
_PATH: Final = "/metrics"
_PLAIN: Final = "text/plain; charset=utf-8"
_CLOSE_S: Final = 1.0


class _Refused(Exception):
    """The answer to a request without metrics."""

    def __init__(self, status: HTTPStatus, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status, self.text, self.headers = status, text, headers


@asynccontextmanager
async def metrics_served(config: ServiceConfig, metrics: Metrics) -> AsyncIterator[str]:
    """Serves the metrics over the block, if `metrics_listen` is set, and yields the URL, else an empty text.

    The event loop is watched meanwhile. Raises ConfigError when it cannot listen.
    """
    with loop_watched(metrics.loop_stall.set):
        async with _served(config, metrics) as url:
            yield url


@asynccontextmanager
async def _served(config: ServiceConfig, metrics: Metrics) -> AsyncIterator[str]:
    if not config.metrics_listen:
        yield ""
        return
    keys = None
    if config.metrics_keys_file:
        keys = load_keys(config.metrics_keys_file, "metrics_keys_file")
    listener = _MetricsListener(metrics, keys)
    url = await listener.start(config)
    _LOG.info("metrics are served on %s", url)
    try:
        yield url
    finally:
        await listener.close()


class _MetricsListener:
    def __init__(self, metrics: Metrics, keys: ReloadedFiles[Mapping[str, str]] | None) -> None:
        """`keys`: None serves every caller."""
        self._metrics = metrics
        self._keys = keys
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, config: ServiceConfig) -> str:
        """Listens. Returns the URL."""
        host, port = split_host_port(config.metrics_listen)
        files = TlsFiles(config.tls_certificate_file, config.tls_key_file, "")
        tls = server_context(files, "metrics_listen")
        try:
            self._server = await asyncio.start_server(
                self._accept,
                host.strip("[]"),
                port,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else EXCHANGE_S,
                limit=HEAD_BYTES_MAX,
            )
        except OSError as error:
            raise ConfigError(
                f"metrics_listen: cannot listen on {config.metrics_listen}: {error.strerror}; stop what uses the port "
                "or set metrics_listen",
                metadata={"metrics_listen": config.metrics_listen},
            ) from error
        scheme = "http" if tls is None else "https"
        return f"{scheme}://{host}:{self._server.sockets[0].getsockname()[1]}{_PATH}"

    async def close(self) -> None:
        """Ends all connections."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections, timeout=_CLOSE_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with asyncio.timeout(EXCHANGE_S):
                await self._exchange(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            writer.close()
            self._connections.discard(task)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            path, headers = _parse_head(await _read_head(reader))
            self._check(path, headers)
            kind = content_type(headers.get("accept", ""))
            text = await asyncio.to_thread(self._metrics.text, kind)
            answer = _answer(HTTPStatus.OK, text, {"content-type": kind})
        except _Refused as refusal:
            answer = _answer(
                refusal.status, f"{refusal.text}\n", {"content-type": _PLAIN, **refusal.headers}
            )
        writer.write(answer)
        await writer.drain()

    def _check(self, path: str, headers: Mapping[str, str]) -> None:
        known = None if self._keys is None else self._keys.current()
        if known is not None and key_digest(key_in(headers.items())) not in known:
            raise _Refused(
                HTTPStatus.UNAUTHORIZED,
                "a key of metrics_keys_file is required; send it as header 'Authorization: Bearer KEY'",
                **{"www-authenticate": "Bearer"},
            )
        if path != _PATH:
            raise _Refused(HTTPStatus.NOT_FOUND, f"this listener serves {_PATH} only")


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _Refused(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the request has more than {HEAD_BYTES_MAX} bytes; send fewer headers",
        ) from None


def _parse_head(head: bytes) -> tuple[str, dict[str, str]]:
    """The path without its query, and the headers by their names in small letters."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _Refused(HTTPStatus.BAD_REQUEST, "write the request as GET /metrics HTTP/1.1")
    if words[0] != "GET":
        raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "use GET", allow="GET")
    headers: dict[str, str] = {}
    for line in filter(None, lines):
        name, colon, value = line.partition(":")
        if not colon:
            raise _Refused(HTTPStatus.BAD_REQUEST, "write each header as NAME: VALUE")
        headers[name.strip().lower()] = value.strip()
    return words[1].partition("?")[0], headers


def _answer(status: HTTPStatus, text: str, headers: Mapping[str, str]) -> bytes:
    body = text.encode()
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        *(f"{name}: {value}" for name, value in headers.items()),
        f"content-length: {len(body)}",
        "connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
