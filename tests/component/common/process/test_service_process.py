"""A service in a separate process: health, drain, and failures at the start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_common.errors import Draining
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from tests.rpc_errors import error_of
from tests.waiting import PATIENCE_S, until

SCRIPT = Path(__file__).with_name("kiln_service.py")
Process = asyncio.subprocess.Process


async def spawn(*flags: str) -> Process:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )


@asynccontextmanager
async def running(*flags: str) -> AsyncIterator[tuple[Process, str]]:
    """The process and the host:port it prints."""
    process = await spawn("--insecure", *flags)
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        yield process, line.decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def outcome(process: Process) -> tuple[int | None, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, out.decode(), err.decode()


async def test_sigterm_lets_streams_end_and_rejects_new_rpcs() -> None:
    async with running() as (process, endpoint), open_channel(endpoint) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stream = aiter(stub.Generate(inference_pb2.GenerateRequest()))
        texts = [(await anext(stream)).text]
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"draining\n"
        await until(partial(is_refused, endpoint))
        texts += [response.text async for response in stream]
        assert texts == ["0", "1", "2", "3", "4"]
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await error_of(Draining, watch.read())
        code, out, _ = await outcome(process)
        assert (code, out) == (0, "stopped\n")


async def is_refused(endpoint: str) -> bool:
    async with open_channel(endpoint) as late:
        try:
            await inference_pb2_grpc.InferenceServiceStub(late).ListModels(
                inference_pb2.ListModelsRequest(), timeout=PATIENCE_S
            )
        except grpc.aio.AioRpcError as refused:
            return refused.code() is grpc.StatusCode.UNAVAILABLE
    return False


async def test_a_stuck_request_ends_after_the_grace() -> None:
    async with (
        running("--drain-grace-s=0.5") as (process, endpoint),
        open_channel(endpoint) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stream = stub.Generate(inference_pb2.GenerateRequest(text="stuck"))
        await stream.read()
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"draining\n"
        code, _, _ = await outcome(process)
        assert code == 0
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.read()
        assert isinstance(error_from_rpc(ended.value), Draining)


def taken_port(folder: Path) -> tuple[list[str], str]:
    holder = socket.create_server(("127.0.0.1", 0))
    HELD.append(holder)
    listen = f"127.0.0.1:{holder.getsockname()[1]}"
    return [f"--internal-listen={listen}"], (
        f"headrace-kiln: cannot listen on {listen}: Address already in use; "
        "stop what uses the port or set internal_listen"
    )


def wrong_settings(folder: Path) -> tuple[list[str], str]:
    return [
        "--internal-listen=nowhere",
        "--log-level=loud",
    ], "headrace-kiln: internal_listen = 'nowhere' (flag"


def missing_certificate(folder: Path) -> tuple[list[str], str]:
    names = ("certificate", "key", "authority")
    flags = [f"--tls-{name}-file={folder / name}" for name in names]
    return flags, f"headrace-kiln: tls_certificate_file: cannot read {folder / 'certificate'}"


HELD: list[socket.socket] = []


@pytest.mark.parametrize("situation", [taken_port, wrong_settings, missing_certificate])
async def test_a_service_that_cannot_start_prints_one_line_and_exits_2(
    situation: Callable[[Path], tuple[list[str], str]], tmp_path: Path
) -> None:
    flags, expected = situation(tmp_path)
    try:
        code, out, err = await outcome(await spawn(*flags))
    finally:
        while HELD:
            HELD.pop().close()
    assert (code, out) == (2, "")
    assert err.startswith(expected)
    assert err.count("\n") == 1
