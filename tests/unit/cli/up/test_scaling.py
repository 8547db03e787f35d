"""Workers are added and drained until as many run as a target says."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from headrace_cli.up import supervisor
from headrace_cli.up.keeping import NO_RESTARTS, Restarts, Scaler
from headrace_common.errors import ConfigError, DeadlineExceeded, WorkerGone
from headrace_planner.observation import WorkerCounts
from tests.unit.cli.up.fake_processes import FakeProcess, FakeSupervisor
from tests.waiting import until

LIMIT_S = 20.0


class Bench(FakeSupervisor):
    def __init__(self, folder: Path, start_timeout_s: float = LIMIT_S) -> None:
        super().__init__(folder)
        self.scaler = Scaler(
            supervisor=self.supervisor,
            make_spec=self.spec,
            console=self.console,
            drain_timeout_s=lambda _: LIMIT_S,
            start_timeout_s=start_timeout_s,
        )

    def running(self) -> list[str]:
        return sorted(child.spec.name for child in self.supervisor.children if child.running)


@pytest.fixture
async def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    await bench.scaler.apply(WorkerCounts(1, 1))
    return bench


async def test_a_worker_that_drains_gets_no_second_signal(bench: Bench) -> None:
    await bench.scaler.apply(WorkerCounts(1, 2))
    process = bench.processes["decode-1"]
    process.drains = None
    draining = asyncio.create_task(bench.scaler.apply(WorkerCounts(1, 1)))
    await until(lambda: bool(process.signals))
    stopping = asyncio.create_task(bench.supervisor.stop())
    await until(lambda: bool(bench.processes["decode-0"].signals))
    assert process.signals == [signal.SIGTERM]
    process.returncode = 0
    process.ended.set()
    await asyncio.gather(draining, stopping)


async def test_the_youngest_workers_are_drained(bench: Bench) -> None:
    await bench.scaler.apply(WorkerCounts(3, 12))
    await bench.scaler.apply(WorkerCounts(1, 9))
    assert bench.running() == sorted(["prefill-0", *(f"decode-{n}" for n in range(9))])
    for name in ("prefill-1", "prefill-2", "decode-9", "decode-10", "decode-11"):
        assert bench.processes[name].signals == [signal.SIGTERM]
    # Their ends are expected.
    assert bench.supervisor.unexpected_ends() == []
    assert len(bench.supervisor.children) == 10


async def test_workers_of_both_roles_are_scaled(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.scaler.apply(WorkerCounts(0, 0, 3))
    assert bench.running() == ["worker-0", "worker-1", "worker-2"]
    assert bench.scaler.counts() == WorkerCounts(0, 0, 3)
    await bench.scaler.apply(WorkerCounts(0, 0, 1))
    assert bench.running() == ["worker-0"]
    assert bench.processes["worker-2"].signals == [signal.SIGTERM]


@pytest.mark.parametrize(("status", "error"), [(1, WorkerGone), (2, ConfigError)])
async def test_a_worker_that_does_not_start_fails_the_target_and_nothing_else(
    bench: Bench, status: int, error: type[Exception]
) -> None:
    bench.bad["decode-1"] = FakeProcess(ends=status)
    with pytest.raises(error):
        await bench.scaler.apply(WorkerCounts(2, 2))
    assert bench.running() == ["decode-0", "prefill-0", "prefill-1"]
    # Neither the deployment nor the restarts see that end.
    await Restarts(bench.supervisor, bench.console, NO_RESTARTS).step()
    bench.bad.clear()
    await bench.scaler.apply(WorkerCounts(2, 2))
    assert bench.running() == ["decode-0", "decode-1", "prefill-0", "prefill-1"]


async def test_a_start_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No signal reaches the process of the test.
    monkeypatch.setattr(supervisor, "KILL_WAIT_S", 0.01)
    bench = Bench(tmp_path, start_timeout_s=0.01)
    bench.bad["prefill-0"] = FakeProcess(serves=False)
    with pytest.raises(DeadlineExceeded, match="prefill-0 did not serve within"):
        await bench.scaler.apply(WorkerCounts(1, 0))
    assert bench.supervisor.children == []


async def test_a_worker_that_does_not_drain_is_named(bench: Bench) -> None:
    bench.bad["decode-1"] = FakeProcess(drains=3)
    await bench.scaler.apply(WorkerCounts(1, 2))
    with pytest.raises(WorkerGone, match="decode-1 ended with 3"):
        await bench.scaler.apply(WorkerCounts(1, 1))
    assert bench.running() == ["decode-0", "prefill-0"]
