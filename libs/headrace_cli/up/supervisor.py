"""Starts, watches and ends processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from headrace_cli.state import cannot_write
from headrace_cli.up.topology import WORKER_SERVICES, ProcessSpec
from headrace_common.errors import ConfigError, DeadlineExceeded, HeadraceError, WorkerGone
from headrace_common.tasks import wait_briefly

POLL_S = 0.05
TAIL_BYTES = 8_192
TAIL_LINES = 15
KILL_WAIT_S = 5.0
EXIT_MISCONFIGURED = 2
DISK_FULL_BYTES = 1024 * 1024
# vLLM's words where the process of its engine has logged an exception, and ended.
ENGINE_CAUSE_ABOVE = "Engine core initialization failed. See root cause above."
_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception): (?P<text>.+)")
_TERMINATED = (-signal.SIGTERM, 128 + signal.SIGTERM)
# The order in which services end, so that each can use the later ones while it finishes its work.
STOP_ORDER = (("planner",), ("router",), WORKER_SERVICES, ("registry", "pool"))


class ChildProcess(Protocol):
    """The parts of asyncio's Process that the supervisor uses."""

    @property
    def pid(self) -> int:
        """The process id, which is also that of its process group."""

    @property
    def returncode(self) -> int | None:
        """The exit status, -N after signal N, None while the process runs."""

    def send_signal(self, signal: int) -> None:
        """Sends a signal. Raises ProcessLookupError when the process has ended."""

    async def wait(self) -> int:
        """Waits for the end and returns the exit status."""


Spawn = Callable[[ProcessSpec], Awaitable[ChildProcess]]


async def spawn_program(spec: ProcessSpec) -> ChildProcess:
    """Starts a process in its own process group, with its output in its log file."""
    try:
        log = spec.log_file.open("ab" if spec.keeps_log else "wb")
    except OSError as error:
        raise cannot_write(spec.log_file, error) from error
    with log:
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
    """A process that was started.

    `endpoint` is the address of the internal listener of its first worker, and `client_endpoint` that of the client
    listener. Both are empty until it serves.
    """

    spec: ProcessSpec
    process: ChildProcess
    started_s: float = field(default_factory=time.monotonic)
    ready_s: float = 0.0
    endpoint: str = ""
    client_endpoint: str = ""
    stopping: bool = False
    replaced: bool = False
    on_trial: bool = False
    terminated: bool = False

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.returncode is None

    def read_port_file(self) -> bool:
        """Whether the process serves by now."""
        if not self.endpoint and self.spec.port_file.exists():
            lines = self.spec.port_file.read_text(encoding="utf-8").splitlines()
            self.mark_ready(lines[0])
        return bool(self.endpoint)

    def mark_ready(self, port_line: str) -> None:
        """Records that the process serves. `port_line` is the first line of its port file."""
        self.endpoint, _, self.client_endpoint = port_line.strip().partition(" ")
        self.ready_s = time.monotonic()

    def mark_on_trial(self, *, on_trial: bool) -> None:
        """Records whether an end of the process concerns only the call that has added it."""
        self.on_trial = on_trial

    def mark_stopping(self) -> None:
        """Records that the end of the process is expected from now on."""
        self.stopping = True

    def terminate(self) -> None:
        """Sends SIGTERM, once: while the process ends, a second one would kill it."""
        if self.terminated:
            return
        self.terminated = True
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def mark_replaced(self) -> None:
        """Records that the process has ended and that another one takes its place."""
        self.replaced = True

    @property
    def ended_cleanly(self) -> bool:
        """Whether it ended with status 0, or by SIGTERM before it served."""
        code = self.process.returncode
        return code == 0 or (not self.endpoint and code in _TERMINATED)

    @property
    def drained(self) -> bool:
        """Whether it is a worker that served and then exited with status 0."""
        is_worker = self.spec.service in WORKER_SERVICES
        return is_worker and bool(self.ready_s) and self.process.returncode == 0


class Supervisor:
    """Owns the children, and a watchdog that ends them if this process is killed."""

    def __init__(self, stop_grace_s: float = 30.0, spawn: Spawn = spawn_program) -> None:
        self.children: list[Child] = []
        self._stop_grace_s = stop_grace_s
        self._spawn = spawn
        self._watchdog: asyncio.subprocess.Process | None = None

    async def open(self) -> None:
        """Starts the watchdog, in its own session, so that the terminal sends it no signals."""
        self._watchdog = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(Path(__file__).with_name("watchdog.py")),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    async def start(self, spec: ProcessSpec) -> Child:
        """Starts a child."""
        spec.port_file.unlink(missing_ok=True)
        child = Child(spec, await self._spawn(spec))
        self.children.append(child)
        self._notify_watchdog(f"+{child.process.pid}")
        return child

    async def wait_ready(
        self, children: Sequence[Child], on_ready: Callable[[Child], None] = lambda child: None
    ) -> None:
        """Waits until all of these serve, and calls back for each. Raises as `check` does when any child ends."""
        waiting = list(children)
        while True:
            self.check()
            for child in [one for one in waiting if one.read_port_file()]:
                waiting.remove(child)
                on_ready(child)
            if not waiting:
                return
            await asyncio.sleep(POLL_S)

    def check(self) -> None:
        """Raises ConfigError or WorkerGone when a child has ended unexpectedly."""
        for child in self.unexpected_ends():
            raise unexpected_end(child)

    def unexpected_ends(self) -> list[Child]:
        """The children that have ended unexpectedly. The end of a drained or replaced one is expected."""
        ended: list[Child] = []
        for child in self.children:
            if child.running or child.stopping or child.replaced or child.on_trial:
                continue
            if child.drained:
                child.mark_stopping()
            else:
                ended.append(child)
        return ended

    async def restart(self, child: Child) -> Child:
        """Starts a child that has ended again, with the same log. Ends what is left of its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
        self._notify_watchdog(f"-{child.process.pid}")
        self.children.remove(child)
        return await self.start(replace(child.spec, keeps_log=True))

    async def add(self, spec: ProcessSpec, timeout_s: float) -> Child:
        """Starts a child and waits until it serves. Its end before that concerns no other child.

        Raises ConfigError or WorkerGone when it ends, and DeadlineExceeded when it does not serve in time. It is gone
        then.
        """
        child = await self.start(spec)
        child.mark_on_trial(on_trial=True)
        try:
            async with asyncio.timeout(timeout_s):
                while not child.read_port_file():
                    if not child.running:
                        raise unexpected_end(child)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            await self._remove(child)
            raise DeadlineExceeded(
                f"{spec.name} did not serve within {timeout_s:g} s; its log is {spec.log_file}",
                metadata={"process": spec.name},
            ) from None
        except HeadraceError:
            await self._remove(child)
            raise
        child.mark_on_trial(on_trial=False)
        return child

    async def drain(self, child: Child, timeout_s: float) -> None:
        """Ends a child by SIGTERM, so that it finishes its requests.

        Raises WorkerGone when it does not exit with status 0 in time. It is gone in any case.
        """
        child.mark_stopping()
        child.terminate()
        await wait_briefly(child.process.wait(), timeout_s)
        clean = child.process.returncode == 0
        how = end_text(child) if not child.running else f"{child.spec.name} did not end"
        await self._remove(child)
        if not clean:
            raise WorkerGone(
                f"{how} within {timeout_s:g} s of SIGTERM; its log is {child.spec.log_file}",
                metadata={"process": child.spec.name},
            )

    async def _remove(self, child: Child) -> None:
        """Kills what is left of a child's process group."""
        child.mark_stopping()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)
        await wait_briefly(child.process.wait(), KILL_WAIT_S)
        self._notify_watchdog(f"-{child.process.pid}")
        if child in self.children:
            self.children.remove(child)

    async def stop(self) -> list[Child]:
        """Ends all children, service by service. Returns those that did not exit with status 0.

        The children of a service get SIGTERM. After the grace, the supervisor kills their process groups.
        """
        for child in self.children:
            if child.running:
                child.mark_stopping()
        unclean: list[Child] = []
        for services in STOP_ORDER:
            group = [child for child in self.children if child.spec.service in services]
            unclean += await self._stop_together(group)
        await self._close_watchdog()
        return unclean

    async def _stop_together(self, group: Sequence[Child]) -> list[Child]:
        for child in group:
            if child.running:
                child.terminate()
        waits = [asyncio.create_task(child.process.wait()) for child in group]
        if waits:
            await asyncio.wait(waits, timeout=self._stop_grace_s)
        for child in group:
            # Also after a clean exit, because other processes of its group may still run.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
        if waits:
            await asyncio.wait(waits, timeout=KILL_WAIT_S)
        for child in group:
            self._notify_watchdog(f"-{child.process.pid}")
        return [child for child in group if not (child.ended_cleanly or child.replaced)]

    def _notify_watchdog(self, line: str) -> None:
        if self._watchdog is not None and self._watchdog.stdin is not None:
            with contextlib.suppress(ConnectionError):
                self._watchdog.stdin.write(f"{line}\n".encode())

    async def _close_watchdog(self) -> None:
        if self._watchdog is None or self._watchdog.stdin is None:
            return
        self._watchdog.stdin.close()
        await wait_briefly(self._watchdog.wait(), KILL_WAIT_S)


def unexpected_end(child: Child) -> HeadraceError:
    """The error for a child's unexpected end.

    ConfigError with the child's own message for a wrong setting, else WorkerGone with the end of its log.
    """
    lines = log_tail(child.spec.log_file, TAIL_LINES)
    full = disk_note(child.spec.log_file.parent)
    if child.process.returncode == EXIT_MISCONFIGURED:
        last = lines[-1] if lines else f"{child.spec.name} has an invalid setting, and an empty log"
        return ConfigError(
            f"{_with_cause(last, lines)}{full}", metadata={"process": child.spec.name}
        )
    return WorkerGone(
        f"{end_text(child)}; its log is {child.spec.log_file}{full}",
        metadata={"process": child.spec.name, "log": "\n".join(lines)},
    )


def _with_cause(message: str, lines: Sequence[str]) -> str:
    """`message` with the last exception of the log, where it points there: a process of the engine has logged it."""
    start, pointer, _ = message.partition(ENGINE_CAUSE_ABOVE)
    causes = [found["text"] for line in lines if (found := _EXCEPTION.fullmatch(line))]
    return f"{start}{causes[-1]}" if pointer and causes else message


def end_text(child: Child) -> str:
    """How a child has ended."""
    code = child.process.returncode
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with {code}"
    if code == -signal.SIGKILL and child.spec.service in ("prefill", "worker"):
        how += " (for want of memory, or because it stood still within a write: docs/operations.md)"
    return f"{child.spec.name} {how}"


def disk_note(folder: Path) -> str:
    """A clause for messages where the disk of a folder is full, as logs may lack the reason then."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError:
        return ""
    if free_bytes >= DISK_FULL_BYTES:
        return ""
    return f"; the disk of {folder} is full, with {free_bytes // 1024} KiB free: free some, and start again"


def log_line(path: Path, text: str) -> None:
    """Adds a line of `headrace up` to the log of a child. Without room on the disk, it is missing there."""
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as log:
        log.write(f"{moment}Z WARNING up headrace_cli: {text}\n")


def log_tail(path: Path, line_count: int) -> list[str]:
    """The last lines of a log that are not blank; none without a file."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-line_count:]
