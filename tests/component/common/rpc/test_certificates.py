"""Certificates that change while a server and a channel are open."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace_common import reloading
from headrace_common.access.credentials import TlsFiles
from headrace_common.client_config import ClientFacingConfig
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.handlers import Context, Handler, WrappingInterceptor, guarded
from headrace_common.rpc.server import ClientServices, GrpcServer
from tests.suite.certificates import Authority, presented_serial, serial_in


class SeenCertificates(WrappingInterceptor):
    """The serial numbers of the callers' certificates, in the order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.serials: list[int] = []

    def wrap(self, handler: Handler, method: str) -> Handler:
        return guarded(handler, self._record)

    @asynccontextmanager
    async def _record(self, context: Context) -> AsyncIterator[None]:
        (pem,) = context.auth_context()["x509_pem_cert"]
        self.serials.append(x509.load_pem_x509_certificate(pem).serial_number)
        yield


class Secured:
    """A server with a certificate of `authority`, and the address that it listens on."""

    def __init__(self, authority: Authority) -> None:
        self.files = authority.sign("server")
        self.seen = SeenCertificates()
        config = ClientFacingConfig(**asdict(self.files))
        self._server = GrpcServer(config, (), ClientServices((), [self.seen]))
        self.address = ""

    async def __aenter__(self) -> Secured:
        await self._server.start()
        self.address = self._server.client_endpoint
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.stop(None)


def key_of(files: TlsFiles) -> bytes:
    return Path(files.tls_key_file).read_bytes()


def exchange_key(files: TlsFiles, key: bytes) -> bytes:
    """Writes another key and returns the one that was there."""
    path, old = Path(files.tls_key_file), key_of(files)
    draft = path.with_suffix(".draft")
    draft.write_bytes(key)
    draft.replace(path)
    return old


async def check(channel: grpc.aio.Channel) -> None:
    request = health_pb2.HealthCheckRequest()
    await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    monkeypatch.setattr(reloading, "CHECK_INTERVAL_S", 0.0)
    return Authority(tmp_path / "authority")


async def test_a_server_presents_a_new_certificate_and_keeps_its_connections(
    authority: Authority,
) -> None:
    client = authority.sign("client")
    async with Secured(authority) as server, open_channel(server.address, client) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        assert await presented_serial(server.address, client) == serial_in(server.files)
        before = serial_in(server.files)
        authority.sign("server")
        assert serial_in(server.files) != before
        assert await presented_serial(server.address, client) == serial_in(server.files)
        await check(channel)
        assert not watch.done()


async def test_a_server_with_half_a_new_certificate_presents_the_old_one(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    client = authority.sign("client")
    async with Secured(authority) as server:
        old, old_key = serial_in(server.files), key_of(server.files)
        authority.sign("server")
        new_key = exchange_key(server.files, old_key)
        assert await presented_serial(server.address, client) == old
        assert "belongs to its certificate" in caplog.text
        exchange_key(server.files, new_key)
        assert await presented_serial(server.address, client) == serial_in(server.files)


async def test_new_calls_of_a_channel_present_the_new_certificate(authority: Authority) -> None:
    client = authority.sign("client")
    old = serial_in(client)
    async with Secured(authority) as server, open_channel(server.address, client) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        authority.sign("client")
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        await check(channel)
        assert server.seen.serials == [old, serial_in(client), serial_in(client)]
        assert not watch.done()
        authority.sign("client")
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert server.seen.serials[-1] == serial_in(client)
    assert watch.done()
