"""`health_listen`: what probes without a credential learn, and that they reach nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace_common.access.table import Listener, methods_of
from headrace_common.config import ServiceConfig
from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError
from headrace_common.process import probe
from headrace_common.rpc.server import GrpcServer

CALL_TIMEOUT_S = 10.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def started() -> AsyncIterator[GrpcServer]:
    server = GrpcServer(ServiceConfig(health_listen="127.0.0.1:0", drain_grace_s=30.0), ())
    await server.start()
    try:
        yield server
    finally:
        await server.stop(None)


async def checked(endpoint: str, name: str = "") -> health_pb2.HealthCheckResponse.ServingStatus:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(request, timeout=CALL_TIMEOUT_S)).status


async def test_readiness_follows_the_service_and_liveness_the_process() -> None:
    async with started() as server:
        endpoint = server.health_endpoint
        assert await checked(endpoint) == SERVING
        server.set_serving(False)
        assert (await checked(endpoint), await checked(endpoint, "live")) == (NOT_SERVING, SERVING)
        server.set_serving(True)
        assert await checked(endpoint) == SERVING

        draining, done = asyncio.Event(), asyncio.Event()

        async def drain(deadline: Deadline) -> None:
            draining.set()
            await done.wait()

        serving = asyncio.create_task(server.serve_until_stopped(drain))
        server.request_drain()
        await asyncio.wait_for(draining.wait(), CALL_TIMEOUT_S)
        assert (await checked(endpoint), await checked(endpoint, "live")) == (NOT_SERVING, SERVING)
        done.set()
        await asyncio.wait_for(serving, CALL_TIMEOUT_S)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await checked(endpoint, "live")
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_name_of_a_service_is_not_found() -> None:
    async with started() as server:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await checked(server.health_endpoint, "headrace.registry.v1.RegistryService")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_every_other_rpc_is_unimplemented() -> None:
    every = {method for listener in Listener for method in methods_of(listener)}
    others = sorted(every - methods_of(Listener.HEALTH))
    assert "/grpc.health.v1.Health/Watch" in others
    async with (
        started() as server,
        grpc.aio.insecure_channel(server.health_endpoint) as channel,
    ):
        for method in others:
            call: Any = channel.unary_unary(method)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(b"", timeout=CALL_TIMEOUT_S)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED, method


async def test_a_large_check_is_refused_before_it_is_parsed() -> None:
    async with started() as server:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await checked(server.health_endpoint, "a" * 2_000)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_it_is_closed_unless_it_is_set_and_a_taken_port_is_named() -> None:
    assert GrpcServer(ServiceConfig(), ()).health_endpoint == ""
    async with started() as server:
        second = GrpcServer(ServiceConfig(health_listen=server.health_endpoint), ())
        with pytest.raises(ConfigError, match="set health_listen"):
            await second.start()
        await second.stop(None)


async def test_the_probe_exits_as_the_service_is(capfd: pytest.CaptureFixture[str]) -> None:
    async with started() as server:
        endpoint = server.health_endpoint
        asked = ["--timeout-s", "10", endpoint]
        assert await asyncio.to_thread(probe.main, asked) == 0
        server.set_serving(False)
        assert await asyncio.to_thread(probe.main, asked) == 1
        assert capfd.readouterr().err == f"headrace-probe: {endpoint} reports NOT_SERVING\n"
        assert await asyncio.to_thread(probe.main, [*asked, "--service", "live"]) == 0
    assert await asyncio.to_thread(probe.main, asked) == 1
    assert f"headrace-probe: {endpoint} reports UNAVAILABLE" in capfd.readouterr().err


@pytest.mark.parametrize(
    "words, problem",
    [
        (["7059"], "as host:port"),
        (["127.0.0.1:0"], "as host:port"),
        (["http://127.0.0.1:7059"], "as host:port"),
        (["--timeout-s", "0"], "seconds above 0"),
        (["--timeout-s", "61"], "seconds above 0"),
    ],
)
def test_a_wrong_argument_of_the_probe_is_named(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        probe.main(words)
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err
