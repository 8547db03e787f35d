"""The proxy: one address for a prefill and a decode vLLM server that hand KV caches over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from headrace_cli.pair.http_streams import (
    HEAD_BYTES_MAX,
    Address,
    HttpRequest,
    Upstream,
    error_response,
    read_http_request,
    status_of,
)
from headrace_cli.pair.requests import Pair, split, without_transfer_params
from headrace_common.config import split_host_port
from headrace_common.errors import (
    ConfigError,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    InvalidRequest,
    TransferTimeout,
    WorkerGone,
)
from headrace_common.identity import new_transfer_id
from headrace_common.logs import setup_logging

log = logging.getLogger(__name__)

STATUSES: dict[type[HeadraceError], HTTPStatus] = {
    InvalidRequest: HTTPStatus.BAD_REQUEST,
    WorkerGone: HTTPStatus.BAD_GATEWAY,
    DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
}
CONNECTIONS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Listening:
    """The address on which the proxy listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Settings of the proxy.

    `pair_address` is the prefill server's. `transfer_timeout_s` limits the wait for prefill, `timeout_s`
    the whole request.
    """

    prefill: Address
    decode: Address
    pair_address: tuple[str, int]
    listening: Listening
    timeout_s: float
    transfer_timeout_s: float


class PairProxy:
    """Forwards requests. When prefill fails, decode computes the whole request."""

    def __init__(self, options: PairOptions) -> None:
        self._options = options
        self._connections = 0

    async def serve(self) -> asyncio.Server:
        """Starts to listen. Raises ConfigError."""
        listening = self._options.listening
        try:
            return await asyncio.start_server(
                self._on_connection, listening.host, listening.port, limit=HEAD_BYTES_MAX
            )
        except OSError as exc:
            raise ConfigError(
                f"cannot listen on {listening.host}:{listening.port}: {exc.strerror or exc}; set --port"
            ) from exc

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._connections += 1
        try:
            await self._answer(reader, writer)
        except ConnectionError:
            log.info("a client disconnected")
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reply = _Reply(writer)
        try:
            request = await read_http_request(reader, writer)
            if request is None:
                return
            if self._connections > CONNECTIONS_MAX:
                raise WorkerGone(f"{CONNECTIONS_MAX} requests are in flight already")
            await self._until_disconnect(
                reader, self._handle(without_transfer_params(request), reply)
            )
        except HeadraceError as exc:
            await reply.fail(exc)
        except Exception as exc:
            log.exception("a request failed because of a bug")
            await reply.fail(InternalError(f"{type(exc).__name__}: {exc}"))

    async def _until_disconnect(
        self, reader: asyncio.StreamReader, work: Coroutine[Any, Any, None]
    ) -> None:
        """Runs `work`. Cancels it, with its requests to the servers, when the client disconnects."""
        task = asyncio.create_task(work)
        disconnect = asyncio.create_task(_wait_disconnect(reader))
        try:
            await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for ending in (task, disconnect):
                ending.cancel()
            results = await asyncio.gather(task, disconnect, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _handle(self, request: HttpRequest, reply: _Reply) -> None:
        options = self._options
        transfer_id = new_transfer_id()
        pair = split(
            request,
            transfer_id=transfer_id,
            pair_address=options.pair_address,
            remaining_s=options.transfer_timeout_s,
        )
        try:
            async with asyncio.timeout(options.timeout_s):
                if pair is None or not await self._run_pair(pair, reply, transfer_id):
                    await _forward(Upstream(options.decode, request), reply)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the request took more than {options.timeout_s:g} s",
                metadata={"timeout_s": f"{options.timeout_s:g}"},
            ) from None

    async def _run_pair(self, pair: Pair, reply: _Reply, transfer_id: str) -> bool:
        """Runs both requests and forwards the answer of decode.

        False when prefill failed before decode responded. Then the client has received nothing.
        """
        decode = Upstream(self._options.decode, pair.decode)
        first = asyncio.create_task(decode.start())
        prefill = asyncio.create_task(self._prefill(pair.prefill))
        try:
            await asyncio.wait({first, prefill}, return_when=asyncio.FIRST_COMPLETED)
            failure = prefill.exception() if prefill.done() else None
            if failure is not None and not first.done():
                log.warning("decode computes the prompt of %s: %s", transfer_id, failure)
                return False
            await reply.send(await first)
            await _forward(decode, reply, started=True)
            return True
        finally:
            # Decode has received the whole cache before it responds, so prefill is not needed any more.
            for task in (first, prefill):
                task.cancel()
            await asyncio.gather(first, prefill, return_exceptions=True)
            decode.close()

    async def _prefill(self, request: HttpRequest) -> None:
        """Runs the prefill request. Raises WorkerGone when it fails, TransferTimeout when it takes too long."""
        upstream = Upstream(self._options.prefill, request)
        try:
            async with asyncio.timeout(self._options.transfer_timeout_s):
                response = await upstream.start()
                while more := await upstream.read():
                    response += more
        except TimeoutError:
            raise TransferTimeout(
                f"{self._options.prefill} took more than {self._options.transfer_timeout_s:g} s"
            ) from None
        finally:
            upstream.close()
        if status_of(response) != HTTPStatus.OK:
            content = response.partition(b"\r\n\r\n")[2][:300].decode(errors="replace")
            raise WorkerGone(
                f"{self._options.prefill} responded with {status_of(response)} {content}"
            )


class _Reply:
    """The response to the client."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._started = False

    async def send(self, data: bytes) -> None:
        self._started = True
        self._writer.write(data)
        await self._writer.drain()

    async def fail(self, error: HeadraceError) -> None:
        """Sends the error. After the first bytes of a response, aborts the connection instead."""
        log.warning("%s", error.detail)
        if self._started:
            self._writer.transport.abort()
            return
        status = STATUSES.get(type(error), HTTPStatus.INTERNAL_SERVER_ERROR)
        with suppress(ConnectionError):
            await self.send(error_response(error, status))


async def _forward(upstream: Upstream, reply: _Reply, *, started: bool = False) -> None:
    try:
        if not started:
            await reply.send(await upstream.start())
        while more := await upstream.read():
            await reply.send(more)
    finally:
        upstream.close()


async def _wait_disconnect(reader: asyncio.StreamReader) -> None:
    """Waits until the client disconnects. Ignores further bytes."""
    with suppress(ConnectionError):
        while await reader.read(HEAD_BYTES_MAX):
            continue


async def run_pair(
    prefill: str,
    decode: str,
    pair_address: str,
    listening: Listening,
    timeout_s: float,
    transfer_timeout_s: float,
) -> None:
    """Serves until cancelled. Raises ConfigError for an invalid or used address."""
    setup_logging("info", "pair", "")
    try:
        host, port = split_host_port(pair_address)
    except ValueError as exc:
        raise ConfigError(f"--pair-address {pair_address!r} is wrong: {exc}") from exc
    options = PairOptions(
        prefill=Address.of_url(prefill),
        decode=Address.of_url(decode),
        pair_address=(host, port),
        listening=listening,
        timeout_s=timeout_s,
        transfer_timeout_s=transfer_timeout_s,
    )
    server = await PairProxy(options).serve()
    async with server:
        bound, number = server.sockets[0].getsockname()[:2]
        log.info("serving %s and %s on http://%s:%d", prefill, decode, bound, number)
        await server.serve_forever()
