"""The services of one deployment on loopback, each a process with a log of its own."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc.aio

from bench.support.processes import process, until_listening
from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_cli.client import list_members
from headrace_cli.up.supervisor import ChildProcess
from headrace_common.errors import WorkerGone
from headrace_common.ports import free_port


class Services:
    """Starts services that end with `stack`. `python` is the interpreter of the checkout that is measured.

    Their logs are in `folder`, at `log_level`. A name of a log ends with `suffix`.
    """

    def __init__(
        self,
        stack: AsyncExitStack,
        folder: Path,
        *,
        python: str = sys.executable,
        log_level: str = "error",
        suffix: str = "",
    ) -> None:
        self._stack = stack
        self._folder = folder
        self._python = python
        self._log_level = log_level
        self._suffix = suffix

    async def start(self, service: str, *flags: str, name: str = "", port: int = 0) -> ChildProcess:
        """Starts a service, and waits until it listens on `port`, if one is given. Its log has `name`."""
        command = (self._python, "-m", f"headrace_{service}", *flags)
        return await self.run(
            *(*command, f"--log-level={self._log_level}"), name=name or service, port=port
        )

    async def run(self, *command: str, name: str, port: int = 0) -> ChildProcess:
        """Starts another program in the same way."""
        log = self._folder / f"{name}{self._suffix}.log"
        child = await self._stack.enter_async_context(process(*command, log=log))
        if port:
            await until_listening(port, child, log)
        return child

    async def start_registry(self) -> tuple[ChildProcess, str]:
        """The registry's process and endpoint."""
        port = free_port()
        endpoint = f"127.0.0.1:{port}"
        flags = (f"--internal-listen={endpoint}",)
        return await self.start("registry", *flags, port=port), endpoint

    async def start_router(self, *flags: str) -> tuple[ChildProcess, str]:
        """The router's process and the endpoint of its gRPC clients."""
        port = free_port()
        endpoint = f"127.0.0.1:{port}"
        return await self.start("router", f"--listen={endpoint}", *flags, port=port), endpoint

    async def start_etcd(self, *flags: str) -> tuple[ChildProcess, str]:
        """The process and endpoint of an etcd that is empty."""
        port = free_port()
        client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
        child = await self.run(
            *("/usr/bin/etcd", "--data-dir", str(self._folder / "etcd"), "--log-level", "error"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}", "--logger", "zap", *flags),
            name="etcd",
            port=port,
        )
        return child, f"127.0.0.1:{port}"


async def until_joined(registry: str, members: int, limit_s: float) -> None:
    """Waits until so many members are registered."""
    async with asyncio.timeout(limit_s):
        while True:
            # The registry may not answer in time while all processes start.
            with suppress(WorkerGone):
                if len(await list_members(registry)) >= members:
                    return
            await asyncio.sleep(0.1)


async def until_listed(endpoint: str, prefills: int, decodes: int, limit_s: float) -> None:
    """Waits until the router lists so many workers."""
    async with asyncio.timeout(limit_s), grpc.aio.insecure_channel(endpoint) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        while True:
            listed = await stub.ListModels(inference_pb2.ListModelsRequest(), wait_for_ready=True)
            for model in listed.models:
                if (model.prefill_worker_count, model.decode_worker_count) == (prefills, decodes):
                    return
            await asyncio.sleep(0.1)
