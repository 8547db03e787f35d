"""`headrace up` starts killed workers again, within bounds."""

from __future__ import annotations

import io
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from headrace_cli.up.keeping import RestartPolicy, Restarts
from headrace_cli.up.supervisor import ChildProcess, Supervisor
from headrace_cli.up.topology import ProcessSpec

KILLED = -int(signal.SIGKILL)
# No process has this id, so that no signal reaches one.
PID = 2**22 + 1
POLICY = RestartPolicy(count_max=2, first_delay_s=1.0, delay_max_s=1.5)


@dataclass
class FakeProcess:
    returncode: int | None = None
    pid: int = PID

    def send_signal(self, signal: int) -> None:
        self.returncode = 0

    async def wait(self) -> int:
        return self.returncode or 0


@dataclass
class Bench:
    """A supervisor of fake processes, a clock, and what the terminal shows."""

    folder: Path
    policy: RestartPolicy = POLICY
    started: list[ProcessSpec] = field(default_factory=list)
    processes: list[FakeProcess] = field(default_factory=list)
    now_s: float = 0.0
    terminal: io.StringIO = field(default_factory=io.StringIO)

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(spawn=self.spawn)
        console = Console(file=self.terminal, width=200)
        self.restarts = Restarts(self.supervisor, console, self.policy, lambda: self.now_s)

    async def spawn(self, spec: ProcessSpec) -> ChildProcess:
        self.started.append(spec)
        self.processes.append(FakeProcess())
        return self.processes[-1]

    async def start(self, service: str = "decode") -> ProcessSpec:
        name = f"{service}-0"
        port, log = self.folder / f"{name}.port", self.folder / f"{name}.log"
        spec = ProcessSpec(name, service, (), port, log, {})
        child = await self.supervisor.start(spec)
        log.write_text("the log of before\n")
        child.mark_ready("127.0.0.1:1")
        return spec

    async def step_at(self, now_s: float) -> None:
        self.now_s = now_s
        await self.restarts.step()

    def shown(self) -> list[str]:
        return self.terminal.getvalue().splitlines()


@pytest.fixture
async def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_a_killed_worker_starts_again_after_a_delay_and_says_so(bench: Bench) -> None:
    spec = await bench.start()
    bench.processes[0].returncode = KILLED
    await bench.step_at(10.0)
    (line,) = bench.shown()
    assert line == ("decode-0 was killed by signal 9; it starts again in 1 s (restart 1 of 2)")
    await bench.step_at(10.9)
    assert len(bench.started) == 1
    await bench.step_at(11.0)
    assert len(bench.started) == 2
    assert bench.started[1].keeps_log
    spec.port_file.write_text("127.0.0.1:2 127.0.0.1:3\n")
    await bench.step_at(11.1)
    await bench.step_at(11.2)
    assert bench.shown()[1:] == ["decode-0 serves again on 127.0.0.1:2"]
    log = spec.log_file.read_text()
    assert log.startswith("the log of before\n")
    for line in bench.shown():
        assert line in log
    assert await bench.supervisor.stop() == []


async def test_old_restarts_do_not_count(bench: Bench) -> None:
    await bench.start()
    for at_s in (0.0, 1_000.0, 2_000.0, 3_000.0):
        bench.processes[-1].returncode = KILLED
        await bench.step_at(at_s)
        await bench.step_at(at_s + 1.0)
    assert len(bench.started) == 5
    assert all("(restart 1 of 2)" in line for line in bench.shown())


async def test_a_drained_worker_stays_away(bench: Bench) -> None:
    await bench.start()
    bench.processes[0].returncode = 0
    await bench.step_at(0.0)
    await bench.step_at(100.0)
    assert len(bench.started) == 1
    assert not bench.shown()


async def test_a_worker_that_served_must_end_with_status_0(bench: Bench) -> None:
    await bench.start()
    bench.processes[0].returncode = 128 + signal.SIGTERM
    assert [child.spec.name for child in await bench.supervisor.stop()] == ["decode-0"]
