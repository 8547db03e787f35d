"""Starts services on request as forks of a process that has imported them, for who uses gRPC and so must not fork.

Importing takes a service a second of processor time, which is most of what a test of a few requests costs.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from headrace_cli.up.supervisor import Spawn
from headrace_cli.up.topology import ProcessSpec
from headrace_common.errors import WorkerGone
from headrace_engine.vllm.compat import import_vllm, set_vllm_environment
from tests.forked import Forked, fork, import_services

_READ_BYTES = 65536
_START_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Customer:
    """Who asks by a connection, and what runs for it, by the file descriptor that tells of its end."""

    connection: socket.socket
    pending: bytes = b""
    children: dict[int, Forked] = field(default_factory=dict)


class ForkServer:
    """Forks what is asked for and says how each fork ended; kills those left when who asked for them is gone."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._customers: list[_Customer] = []

    def serve(self, connection: socket.socket) -> None:
        """Returns when the connection is closed."""
        self._admit(connection)
        try:
            while self._customers:
                self._turn()
        finally:
            self._close()

    def serve_all(self, listener: socket.socket, until_closed: int) -> None:
        """Serves whoever connects, until the other end of the pipe `until_closed` is."""
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(until_closed, selectors.EVENT_READ)
        try:
            while self._turn():
                pass
        finally:
            self._close()

    def _close(self) -> None:
        for customer in list(self._customers):
            self._dismiss(customer)
        self._selector.close()

    def _turn(self) -> bool:
        """False when something has happened that nobody is to hear of."""
        for key, _ in self._selector.select():
            if key.data is None:
                return False
            key.data(key.fileobj)
        return True

    def _accept(self, listener: socket.socket) -> None:
        self._admit(listener.accept()[0])

    def _admit(self, connection: socket.socket) -> None:
        customer = _Customer(connection)
        self._customers.append(customer)
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._hear(customer))

    def _hear(self, customer: _Customer) -> None:
        try:
            data = customer.connection.recv(_READ_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            self._dismiss(customer)
            return
        *orders, customer.pending = (customer.pending + data).split(b"\n")
        for order in orders:
            child = self._start(json.loads(order))
            end = os.pidfd_open(child.pid)
            customer.children[end] = child
            self._selector.register(end, selectors.EVENT_READ, partial(self._note_end, customer))
            _say(customer, {"started": child.pid})

    def _note_end(self, customer: _Customer, end: int) -> None:
        child = customer.children.get(end)
        if child is not None and child.poll() is not None:
            self._forget(customer, end)
            _say(customer, {"ended": child.pid, "status": child.status})

    def _forget(self, customer: _Customer, end: int) -> None:
        self._selector.unregister(end)
        os.close(end)
        del customer.children[end]

    def _dismiss(self, customer: _Customer) -> None:
        for end, child in list(customer.children.items()):
            child.kill()
            self._forget(customer, end)
        self._selector.unregister(customer.connection)
        self._customers.remove(customer)
        customer.connection.close()

    def _start(self, order: dict[str, Any]) -> Forked:
        become = partial(self._become, order)
        return fork(order["name"], become, Path(order["log"]))

    def _become(self, order: dict[str, Any]) -> None:
        """Is from now on what `python -m MODULE FLAGS`, the order's arguments, would be."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()
        os.setsid()
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["environment"])
        _, _, module, *flags = order["arguments"]
        sys.argv = [module, *flags]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _say(customer: _Customer, message: dict[str, int | None]) -> None:
    try:
        customer.connection.sendall(json.dumps(message).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        # Its end is read next.
        return


class RemoteFork:
    """A process of the other end; a headrace_cli.up.supervisor.ChildProcess."""

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
    """Asks a ForkServer at the other end of a connection; one event loop's."""

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
            "environment": {**os.environ, **spec.environment},
            "folder": str(Path.cwd()),
            "log": str(spec.log_file),
        }
        self._writer.write(json.dumps(order).encode() + b"\n")
        return await started

    async def close(self) -> None:
        """Ends what still runs."""
        if self._writer is None or self._hearing is None:
            self._connection.close()
            return
        self._hearing.cancel()
        await asyncio.gather(self._hearing, return_exceptions=True)
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)

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


@asynccontextmanager
async def forking(engine: str = "sim") -> AsyncIterator[Spawn]:
    """Starts services as forks of a process that this one starts once. Ends at the end what still runs of them.

    Those with engine vllm have vLLM imported already.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(_server_of_process(engine)))
    client = ForkClient(connection)
    try:
        yield client.spawn
    finally:
        await client.close()


@cache
def _server_of_process(engine: str) -> Path:
    """Where this process's own server for an engine listens. It ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="headrace-forks-")
    path = Path(folder.name) / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", engine, str(listener.fileno())],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(_START_TIMEOUT_S)
        folder.cleanup()

    atexit.register(end)
    return path


def main() -> None:
    """Serves a listening socket until standard input is closed. The arguments are an engine and the socket's number."""
    engine, listening = sys.argv[1:]
    until_closed = os.dup(0)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    import_services()
    if engine == "vllm":
        set_vllm_environment(host="127.0.0.1", kv_cache_gib=1, tensor_parallel_size=1)
        import_vllm()
    with socket.socket(fileno=int(listening)) as listener:
        ForkServer().serve_all(listener, until_closed)


if __name__ == "__main__":
    main()
