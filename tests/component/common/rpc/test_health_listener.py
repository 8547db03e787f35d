"""`health_listen`: what probes without a credential learn, and that they reach nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace_common.access.table import ROLES, Listener
from headrace_common.config import ServiceConfig
from headrace_common.deadlines import Deadline
from headrace_common.process import probe
from headrace_common.rpc.server import GrpcServer
from tests.ports import free_port

CALL_TIMEOUT_S = 10.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def started() -> AsyncIterator[tuple[GrpcServer, str]]:
    endpoint = f"127.0.0.1:{free_port()}"
    server = GrpcServer(ServiceConfig(health_listen=endpoint, drain_grace_s=30.0), ())
    await server.start()
    try:
        yield server, endpoint
    finally:
        await server.stop(None)


async def checked(endpoint: str, name: str = "") -> health_pb2.HealthCheckResponse.ServingStatus:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(request, timeout=CALL_TIMEOUT_S)).status


async def test_readiness_follows_the_service_and_liveness_the_process() -> None:
    async with started() as (server, endpoint):
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


async def test_it_serves_nothing_else_and_refuses_a_large_check_unparsed() -> None:
    every = {method for listener in Listener for method in ROLES[listener]}
    others = every - ROLES[Listener.HEALTH].keys()
    assert "/grpc.health.v1.Health/Watch" in others
    large = health_pb2.HealthCheckRequest(service="a" * 2_000).SerializeToString()
    named = health_pb2.HealthCheckRequest(service="headrace.registry.v1.RegistryService")
    calls = [(method, b"", grpc.StatusCode.UNIMPLEMENTED) for method in sorted(others)]
    for data, code in (
        (large, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (named.SerializeToString(), grpc.StatusCode.NOT_FOUND),
    ):
        calls.append(("/grpc.health.v1.Health/Check", data, code))
    async with started() as (_, endpoint), grpc.aio.insecure_channel(endpoint) as channel:
        for method, data, code in calls:
            call: Any = channel.unary_unary(method)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(data, timeout=CALL_TIMEOUT_S)
            assert refused.value.code() is code, method


async def test_the_probe_exits_as_the_service_is(capfd: pytest.CaptureFixture[str]) -> None:
    async with started() as (server, endpoint):
        asked = ["--timeout-s", "10", endpoint]
        assert await asyncio.to_thread(probe.main, asked) == 0
        server.set_serving(False)
        assert await asyncio.to_thread(probe.main, asked) == 1
        assert capfd.readouterr().err == f"headrace-probe: {endpoint} reports NOT_SERVING\n"
        assert await asyncio.to_thread(probe.main, [*asked, "--service", "live"]) == 0
    assert await asyncio.to_thread(probe.main, asked) == 1
    assert f"headrace-probe: {endpoint} reports UNAVAILABLE" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        probe.main(["http://127.0.0.1:7059"])
