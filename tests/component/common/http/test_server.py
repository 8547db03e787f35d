"""The HTTP server: its certificate, its address, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import grpc.aio
import pytest

from headrace_common.callers.bounds import RequestInput
from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError
from headrace_common.http.bounds import HEADERS_MAX, PIPELINED_MAX, HttpBounds
from headrace_common.http.connection import Connection
from headrace_common.http.exchange import HttpExchange
from headrace_common.http.http2 import PREFACE
from headrace_common.http.server import HttpServer
from headrace_common.process.settings import load_config
from headrace_router.config import RouterConfig
from tests.suite.certificates import Authority


def config_of(**settings: str) -> RouterConfig:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return load_config(
        RouterConfig, ["--model=sim", *flags], prog="test", env_prefix="HEADRACE_TEST_ROUTER_"
    )


BOUNDS = HttpBounds(64)


def server_of(app: Any, config: RouterConfig, bounds: HttpBounds = BOUNDS) -> HttpServer:
    return HttpServer(
        app, config.http_listen, setting="http_listen", tls=config.listen_tls, bounds=bounds
    )


@asynccontextmanager
async def serving(app: Any, bounds: HttpBounds = BOUNDS) -> AsyncIterator[HttpServer]:
    """A server in plaintext, over the block."""
    server = server_of(app, config_of(http_listen="127.0.0.1:0"), bounds)
    server.start()
    try:
        yield server
    finally:
        await server.stop()


GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def connected(
    server: HttpServer, request: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which the request was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    return reader, writer


class SlowApp:
    """Answers when `release` is set."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.release = asyncio.Event()

    async def __call__(self, exchange: HttpExchange) -> None:
        self.entered.set()
        await self.release.wait()
        await exchange.respond(200, b"done")


@pytest.mark.parametrize("required", ["true", "false"])
async def test_clients_need_a_certificate_unless_the_settings_say_otherwise(
    tmp_path: Path, required: str
) -> None:
    files = Authority(tmp_path / "authority").sign("router", "router")
    settings = {"http_listen": "127.0.0.1:0", "client_certificates": required, **asdict(files)}
    app = SlowApp()
    app.release.set()
    server = server_of(app, config_of(**settings))
    server.start()
    try:
        trusting = ssl.create_default_context(cafile=files.tls_authority_file)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = b""
        # The handshake of a client ends before the server has checked its certificate.
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            answer = await reader.read()
        assert app.entered.is_set() == (b"done" in answer) == (required == "false")
        writer.transport.abort()
    finally:
        await server.stop()


async def test_a_drain_waits_for_requests_in_flight_and_accepts_no_more() -> None:
    app = SlowApp()
    async with serving(app) as server:
        reader, writer = await connected(server, GET)
        await asyncio.wait_for(app.entered.wait(), 10)
        drain = asyncio.create_task(server.drain(Deadline.after(20)))
        with contextlib.suppress(ConnectionError):
            # Refused, or reset when the listener closed during the handshake.
            async with asyncio.timeout(10):
                while True:
                    _, other = await connected(server)
                    other.close()
                    await asyncio.sleep(0.02)
        late = mock.Mock()
        late.shut_down = lambda: server.forget(late)
        server.add(late)
        assert not drain.done()
        app.release.set()
        await asyncio.wait_for(drain, 10)
        assert b"done" in await reader.read()
        writer.close()


class ChunkApp:
    """Sends chunks at once until the client's buffers are full, then waits for the client."""

    def __init__(self) -> None:
        self.sent_at_once = 0
        self.refused = asyncio.Event()

    async def __call__(self, exchange: HttpExchange) -> None:
        number = 0
        # More than the buffers of both sockets take.
        while exchange.writable and number < 4_096:
            exchange.write_now(_chunk(number))
            number += 1
        self.sent_at_once = number
        self.refused.set()
        await exchange.write(_chunk(number))
        assert exchange.writable
        await exchange.finish(b"end")
        assert not exchange.writable


def _chunk(number: int) -> bytes:
    return b"%08d" % number * 2_048


async def test_chunks_are_sent_at_once_until_the_client_must_read() -> None:
    app = ChunkApp()
    async with serving(app) as server:
        reader, writer = await connected(server, GET)
        await asyncio.wait_for(app.refused.wait(), 10)
        assert 0 < app.sent_at_once < 4_096
        answer = await asyncio.wait_for(reader.read(), 10)
        body = b"".join(answer.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2])
        assert body == b"".join(map(_chunk, range(app.sent_at_once + 1))) + b"end"
        writer.close()


class BothWays:
    """Sends the same response at once, or for the path /waiting message by message."""

    async def __call__(self, exchange: HttpExchange) -> None:
        exchange.add_header("x-more", "1")
        if exchange.method == "POST":
            with RequestInput(exchange.host):
                assert await exchange.json_body(100) == b"{}"
        if exchange.path == "/waiting":
            await exchange.write(b"first", {"x-name": "value"})
            await exchange.write(b"second")
        else:
            exchange.write_now(b"first", {"x-name": "value"})
            exchange.write_now(b"second")
        await exchange.finish(b"last")
        assert not exchange.writable


async def _exchanged(server: HttpServer, *requests: bytes) -> list[bytes]:
    """The responses on one connection, without their dates."""
    reader, writer = await connected(server)
    responses: list[bytes] = []
    async with asyncio.timeout(10):
        for request in requests:
            writer.write(request)
            response = await reader.readuntil(b"\r\n0\r\n\r\n")
            lines = response.split(b"\r\n")
            responses.append(b"\r\n".join(x for x in lines if not x.startswith(b"date: ")))
        writer.write_eof()
        assert not await reader.read()
    writer.close()
    return responses


@pytest.mark.parametrize(
    "head",
    [
        "GET {} HTTP/1.1\r\nhost: x\r\n\r\n",
        "POST {} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}",
    ],
)
@pytest.mark.parametrize("path", ["/", "/waiting"])
async def test_the_parts_of_a_response_are_chunks(head: str, path: str) -> None:
    request = head.format(path).encode()
    async with serving(BothWays()) as server:
        for response in await _exchanged(server, request, request):
            assert response == (
                b"HTTP/1.1 200 OK\r\nx-name: value\r\nx-more: 1\r\ntransfer-encoding: chunked\r\n\r\n"
                b"5\r\nfirst\r\n6\r\nsecond\r\n4\r\nlast\r\n0\r\n\r\n"
            )


async def test_trailers_count_as_headers_also_when_they_arrive_with_the_end() -> None:
    trailers = b"".join(b"x-%d: 1\r\n" % number for number in range(HEADERS_MAX))
    request = b"POST /waiting HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n%b\r\n"
    async with serving(BothWays()) as server, asyncio.timeout(10):
        reader, writer = await connected(server, request % trailers)
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        writer.close()


@pytest.mark.parametrize(
    ("requests", "answered", "refused"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 40, PIPELINED_MAX + 1, b"429 "),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\nnonsense\r\n\r\n", 1, b"400 "),
    ],
)
async def test_a_request_is_refused_after_the_responses_to_those_before_it(
    requests: bytes, answered: int, refused: bytes
) -> None:
    async with serving(BothWays()) as server, asyncio.timeout(10):
        reader, writer = await connected(server, requests)
        statuses = (await reader.read()).split(b"HTTP/1.1 ")[1:]
        writer.close()
    assert [one[:4] for one in statuses] == [*[b"200 "] * answered, refused]


async def test_what_is_written_in_a_turn_is_sent_at_once() -> None:
    async with serving(BothWays()) as server:
        add, sending = server.add, list[mock.Mock]()

        def recorded(connection: Connection) -> None:
            sending.append(mock.Mock(wraps=connection.transport))
            connection.transport = sending[-1]
            add(connection)

        server.add = recorded  # type: ignore[method-assign]
        await _exchanged(server, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sending[0].write.call_count == 1


@pytest.mark.parametrize(
    ("line", "body"),
    [(b"GET / HTTP/1.0", b"firstsecondlast"), (b"HEAD / HTTP/1.1\r\nconnection: close", b"")],
)
async def test_http_1_0_gets_no_chunks_and_head_no_body(line: bytes, body: bytes) -> None:
    async with serving(BothWays()) as server:
        reader, writer = await connected(server, line + b"\r\n\r\n")
        head, _, received = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert received == body
        writer.close()


async def test_a_client_is_asked_for_the_body_if_it_expects_that() -> None:
    head = b"POST / HTTP/1.1\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n"
    async with serving(BothWays()) as server, asyncio.timeout(10):
        reader, writer = await connected(server, head + b"content-length: 2\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await reader.readuntil(b"\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def _fail(exchange: HttpExchange) -> None:
    if exchange.path == "/header":
        await exchange.respond(200, b"{}", {"x-name": "a\r\nx-other: b"})
    if exchange.path == "/started":
        await exchange.write(b"")


@pytest.mark.parametrize("path", ["/header", "/nothing", "/started"])
async def test_a_response_that_cannot_be_sent_whole_ends_its_connection(path: str) -> None:
    async with serving(_fail) as server:
        reader, writer = await connected(server, b"GET %b HTTP/1.1\r\n\r\n" % path.encode())
        received = b""
        with contextlib.suppress(ConnectionError):
            received = await asyncio.wait_for(reader.read(), 10)
        assert received.startswith(b"HTTP/1.1 500 ") == (path != "/started")
        assert b"x-other" not in received
        assert not received.endswith(b"0\r\n\r\n")
        writer.close()


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"


@pytest.mark.parametrize("step", [1, 150, 10_000])
@pytest.mark.parametrize("offer", [UPGRADE, b"connection: upgrade\r\nupgrade: websocket\r\n"])
async def test_an_offer_to_upgrade_is_ignored_and_the_body_is_read(offer: bytes, step: int) -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    sized = head + offer + b"content-length: 2\r\n\r\n{}"
    chunked = head + b"transfer-encoding: chunked\r\n" + offer + b"\r\n2\r\n{}\r\n0\r\n\r\n"
    plain = head + b"content-length: 2\r\n\r\n{}"
    sent = sized + chunked + plain
    async with serving(BothWays()) as server:
        (expected,) = await _exchanged(server, plain)
        reader, writer = await connected(server)
        async with asyncio.timeout(10):
            for start in range(0, len(sent), step):
                writer.write(sent[start : start + step])
                await asyncio.sleep(0)
            for _ in range(3):
                response = await reader.readuntil(b"\r\n0\r\n\r\n")
                assert response.startswith(b"HTTP/1.1 200 ")
                assert response.partition(b"\r\n\r\n")[2] == expected.partition(b"\r\n\r\n")[2]
        writer.close()


class WaitingApp:
    """Waits until its client has closed the connection."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, exchange: HttpExchange) -> None:
        exchange.end_with_client()
        self.entered.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
        self.ended.set()


@pytest.mark.parametrize("pipelined", [0, 3])
async def test_a_closed_connection_cancels_the_work_for_its_response(pipelined: int) -> None:
    app = WaitingApp()
    async with serving(app) as server:
        _, writer = await connected(server, pipelined * b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + GET)
        async with asyncio.timeout(10):
            await app.entered.wait()
            writer.close()
            await app.ended.wait()


async def test_a_connection_without_a_whole_request_is_closed() -> None:
    async with serving(SlowApp(), HttpBounds(64, head_wait_s=0.1)) as server:
        async with asyncio.timeout(10):
            reader, writer = await connected(server)
            assert await reader.read() == b""
            writer.close()
            reader, writer = await connected(server, b"POST /v1/completions HTTP/1.1\r\nhost:")
            assert (await reader.read(1_024)).startswith(b"HTTP/1.1 408 ")
            writer.close()
    async with serving(BothWays(), HttpBounds(64, head_wait_s=0.1)) as server:
        # The end of a response does not end the wait for the next head.
        reader, writer = await connected(server, b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nhost:")
        async with asyncio.timeout(10):
            assert b"HTTP/1.1 408 " in await reader.read()
        writer.close()


@pytest.mark.parametrize("head", [b"", GET[:-2], GET, GET.replace(b"close", b"keep-alive") * 2])
async def test_an_ended_connection_is_freed_without_a_garbage_collection(head: bytes) -> None:
    async with serving(BothWays()) as server:
        made: list[weakref.ref[Connection]] = []
        add = server.add

        def recorded(connection: Connection) -> None:
            made.append(weakref.ref(connection))
            add(connection)

        server.add = recorded  # type: ignore[method-assign]
        gc.disable()
        try:
            _, writer = await connected(server, head)
            async with asyncio.timeout(10):
                while not made:
                    await asyncio.sleep(0.01)
                writer.close()
                while made[0]() is not None:
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


def test_a_taken_port_and_a_wrong_key_are_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="http_listen: cannot listen on"):
            server_of(SlowApp(), config_of(http_listen=listen))
    authority = Authority(tmp_path / "authority")
    mixed = asdict(authority.sign("one")) | {"tls_key_file": authority.sign("two").tls_key_file}
    with pytest.raises(ConfigError, match="the key must belong to the certificate"):
        server_of(SlowApp(), config_of(http_listen="127.0.0.1:0", **mixed))


async def test_a_grpc_client_of_this_port_gets_the_name_of_the_other_one() -> None:
    async with (
        serving(mock.Mock()) as server,
        grpc.aio.insecure_channel(server.url.removeprefix("http://")) as channel,
    ):
        call: Any = channel.unary_unary("/a.B/C")
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError, match="port of the setting listen") as failed:
                await call(b"", timeout=10)
            assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("frames", [b"\xff\xff\xff" + bytes(6), bytes(9) * 257])
async def test_long_or_many_http2_frames_end_the_connection(frames: bytes) -> None:
    async with serving(mock.Mock(), HttpBounds(64, head_wait_s=3600)) as server:
        reader, writer = await connected(server, PREFACE + frames)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
