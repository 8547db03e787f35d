"""Starts processes, watches them and ends them; by their own ids only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from headrace_cli.up.topology import ProcessSpec
from headrace_common.errors import ConfigError, HeadraceError, WorkerGone

POLL_S = 0.05
TAIL_BYTES = 8_192
TAIL_LINES = 15
KILL_WAIT_S = 5.0
EXIT_MISCONFIGURED = 2
# Services are ended in this order, so that each still finds those that it needs to finish its work.
STOP_ORDER = (("router",), ("prefill", "decode"), ("registry",))


class ChildProcess(Protocol):
    """What is asked of a process that was started."""

    @property
    def pid(self) -> int:
        """The system's number, also of its process group."""

    @property
    def returncode(self) -> int | None:
        """The exit status, a signal's as a negative number; None while it runs."""

    def send_signal(self, signal: int) -> None:
        """Raises ProcessLookupError when it has ended."""

    async def wait(self) -> int:
        """The exit status, once it has ended."""


Spawn = Callable[[ProcessSpec], Awaitable[ChildProcess]]


async def spawn_program(spec: ProcessSpec) -> ChildProcess:
    """Starts a process in a group of its own, its output in its log file."""
    with spec.log_file.open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *spec.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **spec.environment},
            start_new_session=True,
        )


@dataclass(slots=True)
class Child:
    """One process that was started. `endpoint` is set once it serves: its first worker's."""

    spec: ProcessSpec
    process: ChildProcess
    started_s: float = field(default_factory=time.monotonic)
    ready_s: float = 0.0
    endpoint: str = ""
    stopping: bool = False

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.returncode is None

    @property
    def drained(self) -> bool:
        """Whether it is a worker that ended well after it had served."""
        is_worker = self.spec.service in ("prefill", "decode")
        return is_worker and bool(self.ready_s) and self.process.returncode == 0


class Supervisor:
    """Owns the children, and a watchdog that ends them should this process be killed."""

    def __init__(self, stop_grace_s: float = 30.0, spawn: Spawn = spawn_program) -> None:
        self.children: list[Child] = []
        self._stop_grace_s = stop_grace_s
        self._spawn = spawn
        self._watchdog: asyncio.subprocess.Process | None = None

    async def open(self) -> None:
        """Starts the watchdog. It lives in a session of its own, out of the terminal's reach."""
        self._watchdog = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(Path(__file__).with_name("watchdog.py")),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    async def start(self, spec: ProcessSpec) -> Child:
        """Starts a process in a group of its own, its output in its log file."""
        spec.port_file.unlink(missing_ok=True)
        child = Child(spec, await self._spawn(spec))
        self.children.append(child)
        self._tell_watchdog(f"+{child.process.pid}")
        return child

    async def wait_ready(self, children: Sequence[Child]) -> None:
        """Returns once all of them serve. Raises as `check` when any child ends meanwhile."""
        while True:
            self.check()
            for child in children:
                if not child.endpoint and child.spec.port_file.exists():
                    child.endpoint = child.spec.port_file.read_text(encoding="utf-8").split()[0]
                    child.ready_s = time.monotonic()
            if all(child.endpoint for child in children):
                return
            await asyncio.sleep(POLL_S)

    def check(self) -> None:
        """Raises ConfigError or WorkerGone when a child has ended that nobody had asked to.

        A worker that ends well once it has served was drained.
        """
        for child in self.children:
            if child.running or child.stopping:
                continue
            if not child.drained:
                raise death_of(child)
            child.stopping = True

    async def wait_any_end(self) -> None:
        """Returns only by raising, once a child has ended that nobody had asked to."""
        while True:
            self.check()
            await asyncio.sleep(4 * POLL_S)

    async def stop(self) -> list[Child]:
        """Ends everything, service by service; the children that did not end well by themselves.

        Each service gets SIGTERM and its share of the grace; what is left then is killed with its
        whole group.
        """
        for child in self.children:
            child.stopping = child.stopping or child.running
        unclean: list[Child] = []
        for services in STOP_ORDER:
            group = [child for child in self.children if child.spec.service in services]
            unclean += await self._stop_together(group)
        await self._close_watchdog()
        return unclean

    async def _stop_together(self, group: Sequence[Child]) -> list[Child]:
        for child in group:
            if child.running:
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(signal.SIGTERM)
        waits = [asyncio.create_task(child.process.wait()) for child in group]
        if waits:
            await asyncio.wait(waits, timeout=self._stop_grace_s)
        for child in group:
            # Also after a clean end: whatever the process left in its group must not outlive it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
        if waits:
            await asyncio.wait(waits, timeout=KILL_WAIT_S)
        for child in group:
            self._tell_watchdog(f"-{child.process.pid}")
        return [child for child in group if child.process.returncode != 0]

    def _tell_watchdog(self, line: str) -> None:
        if self._watchdog is not None and self._watchdog.stdin is not None:
            with contextlib.suppress(ConnectionError):
                self._watchdog.stdin.write(f"{line}\n".encode())

    async def _close_watchdog(self) -> None:
        if self._watchdog is None or self._watchdog.stdin is None:
            return
        self._watchdog.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_WAIT_S):
                await self._watchdog.wait()


def death_of(child: Child) -> HeadraceError:
    """What a child's unasked end means: its own one line for a wrong setting, else the end of its
    log.
    """
    lines = log_tail(child.spec.log_file, TAIL_LINES)
    last = lines[-1] if lines else "it said nothing"
    code = child.process.returncode
    if code == EXIT_MISCONFIGURED:
        return ConfigError(last, metadata={"process": child.spec.name})
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with {code}"
    return WorkerGone(
        f"{child.spec.name} {how}; its log is {child.spec.log_file}",
        metadata={"process": child.spec.name, "log": "\n".join(lines)},
    )


def log_tail(path: Path, line_count: int) -> list[str]:
    """The last lines of a log that are not blank."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-line_count:]
