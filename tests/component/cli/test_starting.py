"""Commands and services that start at the same time."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc.aio
import pytest
from typer.testing import CliRunner

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_cli.app import app
from tests.ports import free_port

COMMAND_S = 60.0


class Registry(registry_pb2_grpc.RegistryServiceServicer):
    """Lists a worker that has ended."""

    def __init__(self, worker_endpoint: str) -> None:
        self._worker_endpoint = worker_endpoint

    async def ListMembers(
        self, request: registry_pb2.ListMembersRequest, context: Any
    ) -> registry_pb2.ListMembersResponse:
        member = registry_pb2.Member(
            worker_id="decode-0",
            role=registry_pb2.Member.ROLE_DECODE,
            endpoint=self._worker_endpoint,
        )
        return registry_pb2.ListMembersResponse(members=[member])


async def test_a_command_waits_for_the_service_that_it_calls_and_for_no_member() -> None:
    registry, ended = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace_cli", "workers", "--registry", registry),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert command.stderr is not None
    server = grpc.aio.server()
    try:
        async with asyncio.timeout(COMMAND_S):
            notice = (await command.stderr.readline()).decode()
            # A command line calls no other RPC here.
            registry_pb2_grpc.add_RegistryServiceServicer_to_server(Registry(ended), server)  # type: ignore[abstract]
            server.add_insecure_port(registry)
            await server.start()
            out, err = await command.communicate()
    finally:
        if command.returncode is None:
            command.kill()
            await command.wait()
        await server.stop(None)
    assert notice == (
        f"headrace: {registry} refuses connections; waiting up to 10 s for it to start\n"
    )
    assert (command.returncode, err) == (0, b""), err
    assert "no answer" in out.decode()


@pytest.mark.parametrize(
    "words",
    [
        *("chat x", "route x", "trace", "workers", "drain decode-0", "reset-cache decode-0"),
        *("status", "policy get", "planner explain", "down"),
    ],
)
def test_every_command_says_the_same_where_nothing_is_running(words: str) -> None:
    router = f"127.0.0.1:{free_port()}"
    wait = () if words == "down" else ("--wait", "0")
    ended = CliRunner().invoke(app, [*words.split(), "--router", router, *wait])
    assert ended.exit_code == 1
    assert ended.stderr == (
        f"headrace: nothing serves on {router}: start a deployment with `headrace up`, or name a running one with "
        "--router HOST:PORT\n"
    )
