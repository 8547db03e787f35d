"""A supervisor of processes that only tests end."""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from headrace_cli.up.supervisor import ChildProcess, Supervisor
from headrace_cli.up.topology import ProcessSpec

# No process has these ids, so that no signal reaches one.
PID = 2**22 + 1


@dataclass
class FakeProcess:
    """A worker that serves at once, unless `ends` is its exit status. SIGTERM ends it with `drains`."""

    ends: int | None = None
    drains: int | None = 0
    serves: bool = True
    pid: int = PID
    returncode: int | None = None
    signals: list[int] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, spec: ProcessSpec) -> None:
        self.returncode = self.ends
        if self.ends is None and self.serves:
            spec.port_file.write_text("127.0.0.1:1\n")

    def send_signal(self, signal: int) -> None:
        self.signals.append(signal)
        self.returncode = self.drains
        if self.drains is not None:
            self.ended.set()

    async def wait(self) -> int:
        if self.returncode is None:
            await self.ended.wait()
        return self.returncode or 0


class FakeSupervisor:
    """`bad` has the processes that do not serve and drain as others do. `processes` has the latest of each name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bad: dict[str, FakeProcess] = {}
        self.started: list[ProcessSpec] = []
        self.processes: dict[str, FakeProcess] = {}
        self.terminal = io.StringIO()
        self.supervisor = Supervisor(spawn=self._spawn)
        self.console = Console(file=self.terminal, width=200)

    async def _spawn(self, spec: ProcessSpec) -> ChildProcess:
        process = self.bad.get(spec.name) or FakeProcess()
        self.started.append(spec)
        self.processes[spec.name] = process
        process.begin(spec)
        return process

    def spec(self, service: str, name: str) -> ProcessSpec:
        port, log = self.folder / f"{name}.port", self.folder / f"{name}.log"
        return ProcessSpec(name, service, (), port, log, {})
