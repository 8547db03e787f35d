"""Faults of a worker of both roles under load, and the seconds in which too few requests are good."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from typing import Final

import numpy as np

from bench.goodput.intervals import ATTAINED_MIN
from bench.goodput.report import FACTORS, Block, Objective, bounds_text, row, rule
from bench.support.vllm_ways import Ours, Tree
from headrace_cli.commands.workers import drain_worker
from headrace_cli.up.supervisor import Child

FAULTS: Final = ("killed", "frozen", "drained", "joins")
EVENT_S: Final = 15.0
"""After the start of a block, the fault."""
_FROZEN_S: Final = 20.0
_WINDOW_S: Final = 2.0
_GRID_S: Final = 0.1
_POLL_S: Final = 0.2
_START_S: Final = 300.0


class Faults:
    """Causes one fault in each block. All workers serve before the next one."""

    def __init__(self, workers: Ours, count: int) -> None:
        self._workers = workers
        self._supervisor = workers.deployment.supervisor
        self._count = count
        self._victim = self._worker()

    def _worker(self) -> Child:
        """The last worker: it has the same name in all of its processes."""
        return [one for one in self._supervisor.children if one.spec.service == "worker"][-1]

    async def prepare(self, fault: str) -> None:
        """A worker is missing before it joins."""
        if fault == "joins":
            await self._supervisor.drain(self._victim, _START_S)
            await self._until_served(self._count - 1)

    async def cause(self, fault: str) -> None:
        """Causes the fault when it is due."""
        await asyncio.sleep(EVENT_S)
        if fault == "killed":
            self._victim.mark_replaced()
            self._signal(signal.SIGKILL)
        elif fault == "frozen":
            self._signal(signal.SIGSTOP)
            await asyncio.sleep(_FROZEN_S)
            self._signal(signal.SIGCONT)
        elif fault == "drained":
            registry, name = self._workers.deployment.registry, self._victim.spec.name
            await drain_worker(registry, name, None, wait=True, console=None)
            await self._victim.process.wait()
        else:
            self._victim = await self._supervisor.add(self._victim.spec, _START_S)
            joined_s = self._victim.ready_s - self._victim.started_s
            print(f"the worker serves after {joined_s:.1f} s", file=sys.stderr)

    def _signal(self, number: signal.Signals) -> None:
        """Sends it to the worker and its engine, which has a process group of its own."""
        for process in Tree(self._victim.process.pid).processes():
            process.send_signal(number)

    async def repair(self) -> None:
        """Starts the worker again if it has ended, and waits until all serve."""
        if self._victim.process.returncode is not None:
            self._victim.mark_replaced()
            self._victim = await self._supervisor.restart(self._victim)
        await self._until_served(self._count)

    async def _until_served(self, count: int) -> None:
        async with asyncio.timeout(_START_S):
            while True:
                listed = await self._workers.operator.models()
                for model in listed.models:
                    if model.prefill_worker_count == model.decode_worker_count == count:
                        return
                await asyncio.sleep(_POLL_S)


def seconds_below(due: Sequence[tuple[float, bool]], start_s: float, end_s: float) -> float:
    """The seconds at which too few requests around them were good. `due`: when each was due, and whether it was good.

    Around a second are the requests that are due within a window of _WINDOW_S.
    """
    due_s = np.array([one for one, _ in due])
    good = np.array([kept for _, kept in due])
    below = 0
    for at_s in np.arange(start_s, end_s, _GRID_S):
        around = good[np.abs(due_s - at_s) < _WINDOW_S / 2]
        below += bool(len(around)) and around.mean() < ATTAINED_MIN
    return float(below * _GRID_S)


def faults_table(blocks: Sequence[Block], alone: Objective) -> str:
    """A row for each fault and pair of bounds, over all blocks of a rate."""
    titles = (
        *("fault", "requests/s", "TTFT and TPOT at most", "seconds below 90 % before", "after"),
        *("not good before", "after", "requests", "failed", "blocks", "idle", "steps"),
    )
    lines = [row(titles), rule(len(titles))]
    for fault, rate in dict.fromkeys((block.fault, block.rate) for block in blocks):
        group = [one for one in blocks if (one.fault, one.rate) == (fault, rate)]
        answers = [answer for block in group for answer in block.answers]
        end_s = max(answer.due_s for answer in answers)
        for factors in FACTORS:
            due = [(answer.due_s, answer.keeps(alone.times(factors))) for answer in answers]
            before = sum(not good for at_s, good in due if at_s < EVENT_S)
            cells = (
                *(fault, f"{rate:g}", bounds_text(alone, factors)),
                f"{seconds_below(due, 0.0, EVENT_S):.1f}",
                *(f"{seconds_below(due, EVENT_S, end_s):.1f}", str(before)),
                *(str(sum(not good for _, good in due) - before), str(len(due))),
                *(str(sum(answer.failed for answer in answers)), str(len(group))),
                f"{100 * min(block.idle for block in group):.0f} %",
                f"{max(block.stretch for block in group):.3f}",
            )
            lines.append(row(cells))
    return "\n".join(lines)
