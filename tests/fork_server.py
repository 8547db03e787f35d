"""Starts services on request as forks of a process that has imported them. A process that uses gRPC must not fork.

Importing costs a second of processor time for each service. That is most of the time of a test with a few requests.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace_cli.up.supervisor import Spawn
from headrace_cli.up.topology import ProcessSpec
from headrace_common.errors import WorkerGone
from headrace_engine.vllm.compat import import_vllm, set_vllm_environment
from tests.forked import Forked, fork, import_services

SOCKET_VARIABLE = "HEADRACE_TEST_FORK_SERVER"
"""A program that a test starts uses the fork server of the test by it."""
TORCHVISION = Path("build/torchvision").resolve()
"""For models of images on processors: the package index may have none that torch accepts."""
TORCHVISION_PATH = [] if find_spec("torchvision") else [str(TORCHVISION)]
"""Of PYTHONPATH, for processes with vLLM."""
_READ_BYTES = 65536
_START_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Client:
    """A connected client and its children, by pidfd. A pidfd is readable when its process has exited."""

    connection: socket.socket
    pending: bytes = b""
    children: dict[int, Forked] = field(default_factory=dict)


class ForkServer:
    """Forks requested processes and reports their exit statuses. Kills the children of a client that disconnects."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._clients: list[_Client] = []

    def serve(self, connection: socket.socket) -> None:
        """Serves one client. Returns when it closes the connection."""
        self._add_client(connection)
        try:
            while self._clients:
                self._handle_events()
        finally:
            self._close()

    def serve_all(self, listener: socket.socket, until_closed: int) -> None:
        """Serves all clients that connect. Returns when the other end of the pipe `until_closed` is closed."""
        self._selector.register(listener, selectors.EVENT_READ, self._accept_client)
        self._selector.register(until_closed, selectors.EVENT_READ)
        try:
            while self._handle_events():
                pass
        finally:
            self._close()

    def _close(self) -> None:
        for client in list(self._clients):
            self._remove_client(client)
        self._selector.close()

    def _handle_events(self) -> bool:
        """Waits for events and calls their handlers. False when `until_closed` was closed."""
        for key, _ in self._selector.select():
            if key.data is None:
                return False
            key.data(key.fileobj)
        return True

    def _accept_client(self, listener: socket.socket) -> None:
        self._add_client(listener.accept()[0])

    def _add_client(self, connection: socket.socket) -> None:
        client = _Client(connection)
        self._clients.append(client)
        self._selector.register(
            connection, selectors.EVENT_READ, lambda _: self._read_requests(client)
        )

    def _read_requests(self, client: _Client) -> None:
        try:
            data = client.connection.recv(_READ_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            self._remove_client(client)
            return
        *requests, client.pending = (client.pending + data).split(b"\n")
        for request in requests:
            child = self._fork(json.loads(request))
            pidfd = os.pidfd_open(child.pid)
            client.children[pidfd] = child
            self._selector.register(pidfd, selectors.EVENT_READ, partial(self._report_exit, client))
            _send(client, {"started": child.pid})

    def _report_exit(self, client: _Client, pidfd: int) -> None:
        child = client.children.get(pidfd)
        if child is not None and child.poll() is not None:
            self._remove_child(client, pidfd)
            _send(client, {"ended": child.pid, "status": child.status})

    def _remove_child(self, client: _Client, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        del client.children[pidfd]

    def _remove_client(self, client: _Client) -> None:
        for pidfd, child in list(client.children.items()):
            child.kill()
            self._remove_child(client, pidfd)
        self._selector.unregister(client.connection)
        self._clients.remove(client)
        client.connection.close()

    def _fork(self, request: dict[str, Any]) -> Forked:
        run_module = partial(self._run_module, request)
        return fork(request["name"], run_module, Path(request["log"]))

    def _run_module(self, request: dict[str, Any]) -> None:
        """Turns this fork into `python -m MODULE FLAGS`, from the request's arguments."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()
        os.setsid()
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        _, _, module, *flags = request["arguments"]
        sys.argv = [module, *flags]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _send(client: _Client, message: dict[str, int | None]) -> None:
    try:
        client.connection.sendall(json.dumps(message).encode() + b"\n")
    except (BrokenPipeError, ConnectionResetError):
        # The next read finds the connection closed.
        return


class RemoteFork:
    """A process that the fork server started; a headrace_cli.up.supervisor.ChildProcess."""

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

    def set_ended(self, status: int) -> None:
        """Records the exit status and ends wait()."""
        self.returncode = status
        self._ended.set()


class ForkClient:
    """Requests processes from a ForkServer over a connection. Used by one event loop."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting: deque[asyncio.Future[RemoteFork]] = deque()
        self._running: dict[int, RemoteFork] = {}

    async def spawn(self, spec: ProcessSpec) -> RemoteFork:
        """Starts the process of `spec`. Raises WorkerGone when the fork server has ended."""
        if self._writer is None:
            reader, self._writer = await asyncio.open_connection(sock=self._connection)
            self._reading = asyncio.create_task(self._read_messages(reader), name="forks")
        started: asyncio.Future[RemoteFork] = asyncio.get_running_loop().create_future()
        self._starting.append(started)
        request = {
            "name": spec.name,
            "arguments": spec.arguments,
            "environment": {**os.environ, **spec.environment},
            "folder": str(Path.cwd()),
            "log": str(spec.log_file),
        }
        self._writer.write(json.dumps(request).encode() + b"\n")
        return await started

    async def close(self) -> None:
        """Closes the connection, which makes the server kill the children that still run."""
        if self._writer is None or self._reading is None:
            self._connection.close()
            return
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)

    async def _read_messages(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message: dict[str, int] = json.loads(line)
            if "started" in message:
                child = self._running[message["started"]] = RemoteFork(message["started"])
                started = self._starting.popleft()
                if not started.cancelled():
                    started.set_result(child)
            else:
                self._running.pop(message["ended"]).set_ended(message["status"])
        for started in self._starting:
            started.set_exception(WorkerGone("the fork server has ended"))
        for child in self._running.values():
            child.set_ended(-signal.SIGKILL)


@asynccontextmanager
async def forking(engine: str = "sim") -> AsyncIterator[Spawn]:
    """Yields a function that starts services as forks of this process's fork server. Kills those left at the end.

    The server for engine vllm has imported vLLM, which finds torchvision.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(fork_server(engine)))
    client = ForkClient(connection)
    try:
        yield client.spawn
    finally:
        await client.close()


@cache
def fork_server(engine: str) -> Path:
    """The socket of this process's own fork server for an engine. The server ends with this process.

    For engine sim it is the server that SOCKET_VARIABLE names, if it does.
    """
    if engine == "sim" and (named := os.environ.get(SOCKET_VARIABLE)):
        return Path(named)
    folder = tempfile.TemporaryDirectory(prefix="headrace-forks-")
    path = Path(folder.name) / "socket"
    paths = [*filter(None, sys.path), *(TORCHVISION_PATH if engine == "vllm" else [])]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", engine, str(listener.fileno())],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
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
        set_vllm_environment(host="127.0.0.1", kv_cache_gib=1, rank_count=1)
        import_vllm()
    with socket.socket(fileno=int(listening)) as listener:
        ForkServer().serve_all(listener, until_closed)


if __name__ == "__main__":
    main()
