"""Starts services on request as forks of a process that has imported them, for who uses gRPC and so must not fork."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headrace_cli.topology import ProcessSpec
from headrace_common.errors import WorkerGone
from tests.rdma.processes import Forked, fork

_POLL_S = 0.05
_READ_BYTES = 65536


def serve_forks(connection: socket.socket) -> None:
    """Forks what the other end asks for and says how each fork ended; kills those left when the other end closes."""
    children: list[Forked] = []
    pending = b""
    try:
        while True:
            if select.select([connection], [], [], _POLL_S)[0]:
                data = connection.recv(_READ_BYTES)
                if not data:
                    return
                *orders, pending = (pending + data).split(b"\n")
                for order in orders:
                    child = _start(connection, json.loads(order))
                    children.append(child)
                    _say(connection, {"started": child.pid})
            for child in [child for child in children if child.poll() is not None]:
                children.remove(child)
                _say(connection, {"ended": child.pid, "status": child.status})
    except BrokenPipeError:
        return
    finally:
        for child in children:
            child.kill()


def _say(connection: socket.socket, message: dict[str, int | None]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _start(connection: socket.socket, order: dict[str, Any]) -> Forked:
    become = partial(_become, connection, order["arguments"], order["environment"])
    return fork(order["name"], become, Path(order["log"]))


def _become(
    connection: socket.socket, arguments: Sequence[str], environment: dict[str, str]
) -> None:
    """Is from now on what `python -m MODULE FLAGS`, the arguments, would be."""
    connection.close()
    os.setsid()
    os.environ.update(environment)
    _, _, module, *flags = arguments
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class RemoteFork:
    """A process of the other end; a headrace_cli.supervisor.ChildProcess."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    def send_signal(self, signal: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError(f"process {self.pid} has ended")
        os.kill(self.pid, signal)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def end(self, status: int) -> None:
        """It has ended."""
        self.returncode = status
        self._ended.set()


class ForkClient:
    """Asks serve_forks at the other end of a connection; one event loop's."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._writer: asyncio.StreamWriter | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._awaited: deque[asyncio.Future[RemoteFork]] = deque()
        self._running: dict[int, RemoteFork] = {}

    async def spawn(self, spec: ProcessSpec) -> RemoteFork:
        """Starts what `python -m MODULE FLAGS` would. Raises WorkerGone when nobody forks any more."""
        if self._writer is None:
            reader, self._writer = await asyncio.open_connection(sock=self._connection)
            self._hearing = asyncio.create_task(self._hear(reader), name="forks")
        started: asyncio.Future[RemoteFork] = asyncio.get_running_loop().create_future()
        self._awaited.append(started)
        order = {
            "name": spec.name,
            "arguments": spec.arguments,
            "environment": dict(spec.environment),
            "log": str(spec.log_file),
        }
        self._writer.write(json.dumps(order).encode() + b"\n")
        return await started

    async def close(self) -> None:
        """Ends what still runs."""
        if self._writer is not None and self._hearing is not None:
            self._hearing.cancel()
            await asyncio.gather(self._hearing, return_exceptions=True)
            self._writer.close()

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message: dict[str, int] = json.loads(line)
            if "started" in message:
                child = self._running[message["started"]] = RemoteFork(message["started"])
                started = self._awaited.popleft()
                if not started.cancelled():
                    started.set_result(child)
            else:
                self._running.pop(message["ended"]).end(message["status"])
        for waiter in self._awaited:
            waiter.set_exception(WorkerGone("the process that forks is gone"))
        for child in self._running.values():
            child.end(-signal.SIGKILL)
