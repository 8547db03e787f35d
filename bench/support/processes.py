"""The processes of a benchmark: started, awaited, and their CPU and memory."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from headrace_cli.up.supervisor import ChildProcess
from headrace_cli.up.topology import ProcessSpec
from tests.fork_server import SOCKET_VARIABLE, forking

_CPU_CLOCK: Final = 2
_START_S: Final = 30.0
_END_S: Final = 10.0


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all threads. 0 for pid 0."""
    if not pid:
        return 0.0
    # The kernel's encoding of a process in the id of a clock of CPU time.
    return time.clock_gettime((~pid << 3) | _CPU_CLOCK)


def resident_kib(pid: int) -> int:
    """Memory of a process."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS"))


@asynccontextmanager
async def process(*command: str, log: Path) -> AsyncIterator[ChildProcess]:
    """Runs a command until the block ends. In a test of the benchmark, a Python module is a fork: it starts faster."""
    async with AsyncExitStack() as held:
        child: ChildProcess
        if SOCKET_VARIABLE in os.environ and command[:2] == (sys.executable, "-m"):
            spawn = await held.enter_async_context(forking())
            child = await spawn(ProcessSpec(log.stem, log.stem, command, log, log, {}))
        else:
            with log.open("wb") as written:
                child = await asyncio.create_subprocess_exec(
                    *command, stdout=written, stderr=written
                )
        try:
            yield child
        finally:
            await _end(child)


async def _end(child: ChildProcess) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            child.send_signal(number)
        with suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), _END_S)
            return


async def until_listening(port: int, child: ChildProcess, log: Path) -> None:
    """Waits for the process to accept connections."""
    async with asyncio.timeout(_START_S):
        while True:
            if child.returncode is not None:
                raise _ended_early(log)
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


def _ended_early(log: Path) -> RuntimeError:
    return RuntimeError(log.read_text())
