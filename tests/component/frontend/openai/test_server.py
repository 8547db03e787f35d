"""The HTTP server: its certificate, its address, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from headrace_common.config import load_config
from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError
from headrace_common.reloading import CHECK_INTERVAL_S
from headrace_frontend.openai.exchange import CHUNKS_EXTENSION, ChunkWriter
from headrace_frontend.openai.server import HttpServer
from headrace_router.config import RouterConfig
from tests.suite.certificates import Authority, presented_serial, serial_in


def config_of(**settings: str) -> RouterConfig:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return load_config(
        RouterConfig, ["--model=sim", *flags], prog="test", env_prefix="HEADRACE_TEST_ROUTER_"
    )


class SlowApp:
    """Answers when `release` is set."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.release = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.entered.set()
        await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


async def test_a_replaced_certificate_is_presented(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    files = authority.sign("router", "router")
    server = HttpServer(SlowApp(), config_of(http_listen="127.0.0.1:0", **asdict(files)))
    server.start()
    try:
        endpoint = server.url.removeprefix("https://")
        first = serial_in(files)
        assert await presented_serial(endpoint, files) == first
        authority.sign("router", "router")
        assert serial_in(files) != first
        await asyncio.sleep(CHECK_INTERVAL_S)
        assert await presented_serial(endpoint, files) == serial_in(files)
    finally:
        await server.stop()


@pytest.mark.parametrize("required", ["true", "false"])
async def test_clients_need_a_certificate_unless_the_settings_say_otherwise(
    tmp_path: Path, required: str
) -> None:
    files = Authority(tmp_path / "authority").sign("router", "router")
    settings = {"http_listen": "127.0.0.1:0", "client_certificates": required, **asdict(files)}
    app = SlowApp()
    app.release.set()
    server = HttpServer(app, config_of(**settings))
    server.start()
    try:
        host, _, port = server.url.removeprefix("https://").partition(":")
        trusting = ssl.create_default_context(cafile=files.tls_authority_file)
        reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting)
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
    server = HttpServer(app, config_of(http_listen="127.0.0.1:0"))
    server.start()
    try:
        host, _, port = server.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await asyncio.wait_for(app.entered.wait(), 10)
        drain = asyncio.create_task(server.drain(Deadline.after(20)))
        async with asyncio.timeout(10):
            while True:
                try:
                    _, other = await asyncio.open_connection(host, int(port))
                except ConnectionRefusedError:
                    break
                other.close()
                await asyncio.sleep(0.02)
        assert not drain.done()
        app.release.set()
        await asyncio.wait_for(drain, 10)
        assert b"done" in await reader.read()
        writer.close()
    finally:
        await server.stop()


class ChunkApp:
    """Sends chunks at once until the client's buffers are full, then the rest with `send`."""

    def __init__(self) -> None:
        self.sent_at_once = 0
        self.refused = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        write: ChunkWriter = scope["extensions"][CHUNKS_EXTENSION]
        assert not write(b"too early")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        number = 0
        # More than the buffers of both sockets take.
        while write(_chunk(number)) and number < 4_096:
            number += 1
        self.sent_at_once = number
        self.refused.set()
        await send({"type": "http.response.body", "body": _chunk(number), "more_body": True})
        await send({"type": "http.response.body", "body": b"end"})
        assert not write(b"too late")


def _chunk(number: int) -> bytes:
    return b"%08d" % number * 2_048


async def test_chunks_are_sent_at_once_until_the_client_must_read() -> None:
    app = ChunkApp()
    server = HttpServer(app, config_of(http_listen="127.0.0.1:0"))
    server.start()
    try:
        host, _, port = server.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await asyncio.wait_for(app.refused.wait(), 10)
        assert 0 < app.sent_at_once < 4_096
        answer = await asyncio.wait_for(reader.read(), 10)
        body = b"".join(answer.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2])
        assert body == b"".join(map(_chunk, range(app.sent_at_once + 1))) + b"end"
        writer.close()
    finally:
        await server.stop()


def test_a_taken_port_and_a_wrong_key_are_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="http_listen: cannot listen on"):
            HttpServer(SlowApp(), config_of(http_listen=listen))
    authority = Authority(tmp_path / "authority")
    mixed = asdict(authority.sign("one")) | {"tls_key_file": authority.sign("two").tls_key_file}
    with pytest.raises(ConfigError, match="the key must belong to the certificate"):
        HttpServer(SlowApp(), config_of(http_listen="127.0.0.1:0", **mixed))


@pytest.mark.parametrize("listen", ["192.0.2.1:80", "0.0.0.0:80", "router.example:80"])
def test_off_loopback_requests_need_keys(listen: str) -> None:
    with pytest.raises(ConfigError, match="api_keys_file"):
        config_of(http_listen=listen)
    assert config_of(http_listen=listen, insecure="true").http_listen == listen
