"""The listener of metrics: keys, bounds, formats, TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
from opentelemetry.sdk.resources import Resource

from headrace_common.config import ServiceConfig
from headrace_common.errors import ConfigError
from headrace_common.http.bounds import HEAD_BYTES_MAX
from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics import listener
from headrace_common.telemetry.metrics.listener import metrics_served
from headrace_common.telemetry.metrics.process import Metrics
from tests.suite.certificates import Authority

T = TypeVar("T")
KEY = "the-key-of-a-reader"
READER = f"Authorization: Bearer {KEY}"


@asynccontextmanager
async def serving(tmp_path: Path, **settings: Any) -> AsyncIterator[str]:
    keys = tmp_path / "readers"
    keys.write_text(f"{KEY} prometheus\n", encoding="utf-8")
    config = ServiceConfig(metrics_listen="127.0.0.1:0", metrics_keys_file=str(keys), **settings)
    metrics = Metrics(Resource.create(), "", readable=True)
    metrics.store.counter(schema.METRIC_REQUESTS, schema.ATTRIBUTE_END_REASON).add(1, "stop")
    async with metrics_served(config, metrics) as url:
        yield url


async def send(url: str, head: str, tls: ssl.SSLContext | None = None) -> str:
    """The answer to a request, which the listener ends."""
    parts = urlsplit(url)
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls)
        writer.write(head.encode())
        await writer.drain()
        answer = await reader.read()
        writer.close()
    return answer.decode()


async def until_closed(reading: Coroutine[Any, Any, T]) -> T | str | bytes:
    """What was read. Empty after a reset, which an aborted connection may cause."""
    try:
        async with asyncio.timeout(10):
            return await reading
    except ConnectionError:
        return ""


def get(path: str, *headers: str) -> str:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""])


async def test_a_holder_of_a_key_reads_the_metrics_in_both_formats(tmp_path: Path) -> None:
    async with serving(tmp_path) as url:
        plain = await send(url, get("/metrics", READER))
        assert plain.startswith("HTTP/1.1 200 OK\r\n")
        assert "\r\ncontent-type: text/plain; version=0.0.4" in plain
        assert 'headrace_requests_total{headrace_end_reason="stop"} 1\n' in plain
        accept = "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
        opened = await send(url, get("/metrics?x=1", READER, accept))
        assert "content-type: application/openmetrics-text" in opened
        assert opened.endswith("# EOF\n")


@pytest.mark.parametrize(
    "head, status",
    [
        (get("/metrics"), 401),
        (get("/metrics", "Authorization: Bearer wrong"), 401),
        (get("/metrics", f"Authorization: Bearer {'x' * 600}"), 401),
        (get("/other"), 401),
        (get("/other", READER), 404),
        (f"POST /metrics HTTP/1.1\r\n{READER}\r\n\r\n", 405),
        ("hello\r\n\r\n", 400),
        (get("/metrics", "no colon", READER), 400),
        (get("/metrics", f"X: {'y' * HEAD_BYTES_MAX}", READER), 431),
    ],
)
async def test_other_requests_are_refused(tmp_path: Path, head: str, status: int) -> None:
    async with serving(tmp_path) as url:
        answer = await send(url, head)
        assert answer.startswith(f"HTTP/1.1 {status} ")
        assert "headrace_requests" not in answer


async def test_silent_connections_end_for_a_new_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as url:
        parts = urlsplit(url)
        silent = [
            await asyncio.open_connection(parts.hostname, parts.port)
            for _ in range(3 * listener.CONNECTIONS_MAX)
        ]
        assert (await send(url, get("/metrics", READER))).startswith("HTTP/1.1 200 ")
        for reader, _ in silent[: 2 * listener.CONNECTIONS_MAX]:
            assert not await until_closed(reader.read())
        for _, writer in silent:
            writer.close()


async def test_it_is_off_without_an_address_and_needs_keys_beyond_loopback(tmp_path: Path) -> None:
    metrics = Metrics(Resource.create(), "")
    async with metrics_served(ServiceConfig(), metrics) as url:
        assert url == ""
    with pytest.raises(
        ValueError, match=r"metrics_listen is 0\.0\.0\.0:0, .* needs metrics_keys_file"
    ):
        ServiceConfig(metrics_listen="0.0.0.0:0")
    async with metrics_served(ServiceConfig(metrics_listen="127.0.0.1:0"), metrics) as url:
        assert (await send(url, get("/metrics"))).startswith("HTTP/1.1 200 ")
    async with serving(tmp_path) as url:
        taken = ServiceConfig(
            metrics_listen=f"127.0.0.1:{urlsplit(url).port}",
            metrics_keys_file=str(tmp_path / "readers"),
        )
        with pytest.raises(ConfigError, match="metrics_listen: cannot listen on"):
            async with metrics_served(taken, metrics):
                pass


async def test_it_presents_the_certificate_of_the_process_and_asks_for_none(tmp_path: Path) -> None:
    files = Authority(tmp_path / "authority").sign("router", "router")
    async with serving(tmp_path, **asdict(files)) as url:
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=files.tls_authority_file)
        trusting.check_hostname = False
        answer = await send(url, get("/metrics", READER), trusting)
        assert answer.startswith("HTTP/1.1 200 ")
