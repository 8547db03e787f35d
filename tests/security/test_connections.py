"""Connections to the client listener: an attacker with many of them stops no other client, and none lasts for ever."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace_common.rpc.channel import open_channel
from tests.security.bystander import ROOT
from tests.suite.deployment import Suite, greedy, prompt_of, suite
from tests.waiting import until

_BOUND = 200
_PER_HOST = 100
_BOUNDS = (
    ("router", "max_connections", str(_BOUND)),
    ("router", "max_connections_per_host", str(_PER_HOST)),
    ("router", "max_streams_per_connection", "100"),
)
_WATCH = "/grpc.health.v1.Health/Watch"
_GENERATE = "/headrace.inference.v1.InferenceService/Generate"
_ANSWERS = 4
# An attempt to connect that meets a full listener is repeated after up to two seconds. The attacker competes with the
# services for this machine's processors, so answers are slow.
_ANSWER_S = 45.0


@asynccontextmanager
async def attacking(endpoint: str, kind: str, count: int) -> AsyncIterator[None]:
    """An attacker on another address of this host, with that many connections."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.security.connection_attacker", endpoint, "127.0.0.2", kind),
        str(count),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        await process.wait()


def connections_of(process_id: int, endpoint: str) -> list[str]:
    """The hosts that are connected to an address of a process."""
    port = int(endpoint.rpartition(":")[2])
    return [
        connection.raddr.ip.removeprefix("::ffff:")
        for connection in psutil.Process(process_id).net_connections("tcp")
        if connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
    ]


# The streams are as many as one host may hold: 90 connections of 100 streams.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "count"), [("silent", 1_000), ("http2", 1_000), (_WATCH, 90), (_GENERATE, 90)]
)
async def test_an_attacker_with_many_connections_or_streams_stops_no_other_client(
    tmp_path: Path, kind: str, count: int
) -> None:
    async with suite(tmp_path, settings=_BOUNDS) as it:
        router = it.child("router")
        assert await joined(it.channel)
        open_before = asyncio.create_task(ask_in_turns(it))
        async with attacking(router.client_endpoint, kind, count):
            for seed in range(_ANSWERS):
                begin_s = time.monotonic()
                # A client that comes now has no connection yet.
                async with open_channel(router.client_endpoint) as channel:
                    newcomer = replace(it, channel=channel)
                    prompt = prompt_of(40, seed)
                    await until(lambda: joined(channel), _ANSWER_S, "a connection", 0.05)
                    answer = await newcomer.generate(prompt, 4, timeout_s=_ANSWER_S)
                    assert answer.token_ids == it.expected(prompt, 4)
                print(f"{kind}: answered after {time.monotonic() - begin_s:.3f} s")
            hosts = connections_of(router.process.pid, router.client_endpoint)
            assert len(hosts) <= _BOUND
            assert "127.0.0.1" in hosts
            print(f"{kind}: {len(hosts)} connections")
        await open_before


@pytest.mark.timeout(240)
async def test_a_flood_of_streams_that_are_opened_again_and_again_blocks_its_host(
    tmp_path: Path,
) -> None:
    """A thousand connections with a hundred streams each. All bounds have their defaults."""
    async with suite(tmp_path) as it:
        router = it.child("router")
        assert await joined(it.channel)
        async with attacking(router.client_endpoint, _GENERATE, 1_000):
            for seed in range(8 * _ANSWERS):
                prompt = prompt_of(40, seed)
                begin_s = time.monotonic()
                answer = await it.generate(prompt, 4, timeout_s=_ANSWER_S)
                assert answer.token_ids == it.expected(prompt, 4)
                print(f"flood: answered after {time.monotonic() - begin_s:.3f} s")
        log = router.spec.log_file.read_text()
        assert "blocked 127.0.0.2: it floods this process" in log


async def joined(channel: grpc.aio.Channel) -> bool:
    """Whether a channel reaches its server."""
    try:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
    except grpc.aio.AioRpcError:
        return False
    return True


async def ask_in_turns(it: Suite) -> None:
    """A client with an open connection keeps it."""
    for seed in range(100, 100 + 8 * _ANSWERS):
        prompt = prompt_of(40, seed)
        answer = await it.generate(prompt, 4, timeout_s=_ANSWER_S)
        assert answer.token_ids == it.expected(prompt, 4)
        await asyncio.sleep(0.1)


async def test_connections_end_and_answers_do_not(tmp_path: Path) -> None:
    settings = (
        ("router", "connection_idle_s", "1"),
        ("router", "connection_age_s", "1"),
        ("decode", "model", "sim:decode_step_s=0.1"),
    )
    async with suite(tmp_path, settings=settings) as it:
        router = it.child("router")
        prompt = prompt_of(40, 1)
        begin_s = time.monotonic()
        # Its stream outlives the age of its connection several times.
        asking = asyncio.create_task(it.generate(prompt, 60, timeout_s=60))
        watch = health_pb2_grpc.HealthStub(it.channel).Watch(health_pb2.HealthCheckRequest())
        ends = await asyncio.wait_for(status_at_end(watch), 20)
        assert ends is grpc.StatusCode.DEADLINE_EXCEEDED
        for seed in range(2, 12):
            other = prompt_of(40, seed)
            assert (await it.generate(other, 2)).token_ids == it.expected(other, 2)
        assert (await asking).token_ids == it.expected(prompt, 60)
        assert time.monotonic() - begin_s > 3

        def closed() -> bool:
            return not connections_of(router.process.pid, router.client_endpoint)

        await until(closed, 20, "the end of idle connections", 0.1)
        assert (await it.ask(greedy(prompt, 4))).token_ids == it.expected(prompt, 4)


async def status_at_end(
    watch: grpc.aio.UnaryStreamCall[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
) -> grpc.StatusCode:
    try:
        async for _ in watch:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
