"""`python -m tests.chaos.soak`: mixed load for a while, and a check that no process grows.

Workers have small memories of what is over, so every cache is warm after a third of the time. From then on memory may
grow by 5 %. Open files and threads may not grow, except for connections that come and go. A process counts with those
that it has started.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import parse_settings
from tests.chaos.load import Clients, Outcomes
from tests.chaos.plan import ChaosPlan, WireFaults, requests, with_pool, with_tiers
from tests.chaos.processes import Processes
from tests.chaos.run import left_behind, until_served

CONCURRENCY = 8
MEMORY_GROWTH_MAX = 1.05
COUNT_GROWTH_MAX = 3
SAMPLES_MIN = 30
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """Resources of a process at one moment."""

    rss_mib: float
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Growth:
    """A process when warm and at the end: medians of a sixth of its samples each."""

    name: str
    warm: Sample
    last: Sample

    @property
    def violations(self) -> list[str]:
        """A line for each resource that has grown beyond its bound."""
        found = []
        if self.last.rss_mib > self.warm.rss_mib * MEMORY_GROWTH_MAX:
            found.append(f"{self.name}: {self.warm.rss_mib:.0f} to {self.last.rss_mib:.0f} MiB")
        for what in ("descriptors", "threads"):
            before, after = getattr(self.warm, what), getattr(self.last, what)
            if after > before + COUNT_GROWTH_MAX:
                found.append(f"{self.name}: {before} to {after} {what}")
        return found


@dataclass(slots=True)
class SoakReport:
    """The record of a run. The run passed when `violations` is empty."""

    seconds: float
    outcomes: Outcomes = field(default_factory=Outcomes)
    growths: list[Growth] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        """A line for every broken promise."""
        grown = [text for growth in self.growths for text in growth.violations]
        return [*self.outcomes.violations, *grown, *self.left_behind]


def growth_of(name: str, samples: Sequence[Sample]) -> Growth:
    """Builds the growth from samples at equal intervals."""
    sixth = len(samples) // 6
    return Growth(
        name, _median(samples[2 * sixth : 3 * sixth]), _median(samples[len(samples) - sixth :])
    )


def _median(samples: Sequence[Sample]) -> Sample:
    return Sample(
        statistics.median(one.rss_mib for one in samples),
        round(statistics.median(one.descriptors for one in samples)),
        round(statistics.median(one.threads for one in samples)),
    )


async def soak(
    seconds: float, seed: int, folder: Path, *, tiers: bool = False, pool: bool = False
) -> SoakReport:
    """Runs a soak. Raises only when a process does not start, or has ended.

    `tiers`, `pool`: see `with_tiers` and `with_pool`.
    """
    report = SoakReport(seconds)
    plan = ChaosPlan(
        seed, requests=sys.maxsize, wire=WireFaults(small_memories=True), kinds=frozenset()
    )
    if pool:
        plan = with_pool(plan)
    elif tiers:
        plan = with_tiers(plan)
    processes = Processes(plan, folder)
    try:
        await processes.start()
        model = SimModel(parse_settings(plan.model))
        channels = processes.client_channels()
        clients = Clients(channels, model, processes.model, plan.deadline_s, report.outcomes)
        watched = {name: psutil.Process(pid) for name, pid in processes.process_ids().items()}
        samples: dict[str, list[Sample]] = {name: [] for name in watched}
        try:
            await until_served(processes)
            end_s = time.monotonic() + seconds
            wanted = itertools.takewhile(lambda _: time.monotonic() < end_s, requests(plan))
            load = asyncio.create_task(clients.run(wanted, CONCURRENCY))
            while not load.done():
                for name, process in watched.items():
                    samples[name].append(_look_at(process))
                await asyncio.wait({load}, timeout=seconds / (3 * SAMPLES_MIN))
            load.result()
        finally:
            await clients.close()
        report.growths = [growth_of(name, found) for name, found in samples.items()]
        report.left_behind = await left_behind(processes)
    finally:
        await processes.stop()
    return report


def _look_at(process: psutil.Process) -> Sample:
    """The resources of a process and of those that it has started, such as those that call a remote pool."""
    samples = []
    for one in (process, *process.children(recursive=True)):
        # A child that has ended since.
        with suppress(psutil.NoSuchProcess), one.oneshot():
            rss_mib = one.memory_info().rss / _MIB
            samples.append(Sample(rss_mib, one.num_fds(), one.num_threads()))
    return Sample(
        sum(sample.rss_mib for sample in samples),
        sum(sample.descriptors for sample in samples),
        sum(sample.threads for sample in samples),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tiers", action="store_true", help="with tiers below a KV memory that is too small"
    )
    parser.add_argument("--pool", action="store_true", help="with such tiers, and a remote pool")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="headrace-soak-"))
    report = asyncio.run(
        soak(
            *(arguments.seconds, arguments.seed, folder),
            tiers=arguments.tiers,
            pool=arguments.pool,
        )
    )
    table = Table(title=f"{report.outcomes.counts.total()} requests in {report.seconds:.0f} s")
    for title in ("process", "MiB warm", "MiB last", "files", "files", "threads", "threads"):
        table.add_column(title, justify="left" if title == "process" else "right")
    for growth in report.growths:
        warm, last = growth.warm, growth.last
        numbers = (warm.descriptors, last.descriptors, warm.threads, last.threads)
        table.add_row(growth.name, f"{warm.rss_mib:.1f}", f"{last.rss_mib:.1f}", *map(str, numbers))
    console = Console(width=110)
    console.print(table)
    console.print(", ".join(f"{count} {what}" for what, count in report.outcomes.counts.items()))
    for line in report.violations:
        console.print(f"  {line}", style="bold red", markup=False)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
