"""The router as a process, with a real registry beside it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_common.registry.membership import Membership
from headrace_common.rpc.channel import open_channel
from tests.component.router.fakes import FakeDecode, FakePrefill, Handoff, hand_over, reply, text_of
from tests.waiting import PATIENCE_S, until


class Processes:
    """Starts services, and kills those that are left after the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[asyncio.subprocess.Process] = []

    async def start(self, module: str, *arguments: str) -> tuple[asyncio.subprocess.Process, str]:
        """The process and its addresses, as in its port file; empty when it ended first."""
        port_file = self._folder / f"{len(self._started)}.port"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            "--insecure",
            *arguments,
            "--port-file",
            str(port_file),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stderr=asyncio.subprocess.PIPE,
        )
        self._started.append(process)
        await until(lambda: port_file.exists() or process.returncode is not None, 30.0)
        return process, port_file.read_text() if port_file.exists() else ""

    async def close(self) -> None:
        for process in self._started:
            if process.returncode is None:
                process.kill()
            await process.communicate()


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    await processes.close()


async def test_a_router_registers_serves_and_deregisters(processes: Processes) -> None:
    _, registry = await processes.start("headrace_registry", "--internal-listen", "127.0.0.1:0")
    router, addresses = await processes.start(
        "headrace_router", "--model", "sim", "--registry", registry, "--router-id", "router-0"
    )
    internal, endpoint = addresses.split()
    handoff = Handoff()
    stack = AsyncExitStack()
    decode = await FakeDecode("d0", handoff, reply("ok")).start()  # type: ignore[abstract]
    stack.push_async_callback(decode.kill)
    membership = Membership(registry, decode.member)
    stack.push_async_callback(membership.stop)
    await membership.start()
    prefill = await FakePrefill("p0", handoff, hand_over).start(internal)
    stack.push_async_callback(prefill.close)
    async with stack, open_channel(endpoint) as channel, open_channel(registry) as to_registry:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)

        async def has_prefill_worker() -> bool:
            listed = await stub.ListModels(inference_pb2.ListModelsRequest())
            return bool(listed.models and listed.models[0].prefill_worker_count)

        await until(has_prefill_worker, interval_s=0.05)
        request = inference_pb2.GenerateRequest(text="a prompt")
        responses = [response async for response in stub.Generate(request, timeout=PATIENCE_S)]
        assert text_of(responses) == "ok"
        assert responses[-1].timing.prefill_worker_id == "p0"
        health: Any = health_pb2_grpc.HealthStub(channel)
        name = "headrace.inference.v1.InferenceService"
        state = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)
        assert state.status == health_pb2.HealthCheckResponse.SERVING
        members: Any = registry_pb2_grpc.RegistryServiceStub(to_registry)
        routers = registry_pb2.ListMembersRequest(role=registry_pb2.Member.ROLE_ROUTER)
        (member,) = (await members.ListMembers(routers, timeout=PATIENCE_S)).members
        assert member.worker_id == "router-0"
        assert (member.endpoint, member.client_endpoint) == (internal, endpoint)
        router.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await router.wait() == 0
        assert not (await members.ListMembers(routers, timeout=PATIENCE_S)).members
