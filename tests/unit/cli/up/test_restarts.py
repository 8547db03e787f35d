"""`headrace up` starts killed workers again, within bounds."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from headrace_cli.up.keeping import RestartPolicy, Restarts
from headrace_cli.up.topology import ProcessSpec
from headrace_common.errors import WorkerGone
from tests.unit.cli.up.fake_processes import FakeProcess, FakeSupervisor

KILLED = -int(signal.SIGKILL)
POLICY = RestartPolicy(count_max=2, first_delay_s=1.0, delay_max_s=1.5)


class Bench(FakeSupervisor):
    """A decode worker, a clock, and what the terminal shows."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.now_s = 0.0
        self.restarts = Restarts(self.supervisor, self.console, POLICY, lambda: self.now_s)

    async def start(self) -> ProcessSpec:
        spec = self.spec("decode", "decode-0")
        child = await self.supervisor.start(spec)
        spec.log_file.write_text("the log of before\n")
        child.mark_ready("127.0.0.1:1")
        return spec

    def end(self, status: int) -> None:
        self.bad["decode-0"] = FakeProcess(serves=False)
        self.processes["decode-0"].returncode = status

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
    bench.end(KILLED)
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


async def test_a_drained_worker_stays_away(bench: Bench) -> None:
    await bench.start()
    bench.end(0)
    await bench.step_at(0.0)
    await bench.step_at(100.0)
    assert len(bench.started) == 1
    assert not bench.shown()


async def test_a_worker_that_served_must_end_with_status_0(bench: Bench) -> None:
    await bench.start()
    bench.end(128 + signal.SIGTERM)
    assert [child.spec.name for child in await bench.supervisor.stop()] == ["decode-0"]


@pytest.mark.parametrize(("gives_up", "count_max"), [(True, 1), (True, 0), (False, 0)])
async def test_a_worker_that_ends_too_often_is_given_up_or_ends_everything(
    tmp_path: Path, gives_up: bool, count_max: int
) -> None:
    bench = Bench(tmp_path)
    bench.restarts.policy = RestartPolicy(gives_up=gives_up, count_max=count_max)
    await bench.start()
    bench.end(KILLED)
    if not count_max:
        with pytest.raises(WorkerGone, match="decode-0 was killed"):
            await bench.step_at(0.0)
        return
    for now_s in (0.0, 1.0):
        await bench.step_at(now_s)
    bench.end(KILLED)
    for now_s in (1.0, 100.0):
        await bench.step_at(now_s)
    assert len(bench.started) == 2
    assert "too often: it does not start again" in bench.shown()[-1]
    assert await bench.supervisor.stop() == []
