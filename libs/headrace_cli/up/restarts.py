"""Starts workers and the pool again that ended unexpectedly: `headrace up` repairs what a deployment serves with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console

from headrace_cli.up.supervisor import Child, Supervisor, end_text, log_line, unexpected_end

RESTARTED: Final = ("prefill", "decode", "pool", "planner")
"""Services that others do not need to serve: without the pool, workers compute what it would have had."""
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A worker is started again after `first_delay_s`. Each further delay is twice as long, up to `delay_max_s`.

    After `count_max` restarts of a worker within `window_s`, its next end is final.
    """

    count_max: int = 5
    first_delay_s: float = 1.0
    delay_max_s: float = 30.0
    window_s: float = 600.0

    def delay_s(self, number: int) -> float:
        """The delay before a worker's restart with this number, from 1."""
        return min(self.delay_max_s, self.first_delay_s * 2.0 ** (number - 1))


NO_RESTARTS: Final = RestartPolicy(count_max=0)


@dataclass(slots=True)
class _Worker:
    """A worker that has ended at least once. `due_s`: when it starts again. `starting`: its new process."""

    started_s: list[float] = field(default_factory=list)
    due_s: float | None = None
    ended: Child | None = None
    starting: Child | None = None

    def schedule(self, ended: Child, due_s: float) -> None:
        """Records an end, and when the worker starts again."""
        self.ended, self.due_s, self.starting = ended, due_s, None

    def started(self, child: Child, now_s: float) -> None:
        """Records a restart."""
        self.due_s, self.starting = None, child
        self.started_s.append(now_s)

    def forget_before(self, oldest_s: float) -> None:
        """Restarts before this time no longer count."""
        self.started_s = [at_s for at_s in self.started_s if at_s >= oldest_s]

    def served(self) -> None:
        """The new process serves."""
        self.starting = None


class Restarts:
    """Starts workers of a supervisor again, and reports it on the console and in the worker's log."""

    def __init__(
        self,
        supervisor: Supervisor,
        console: Console,
        policy: RestartPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervisor = supervisor
        self._console = console
        self._policy = policy
        self._clock = clock
        self._workers: dict[str, _Worker] = {}

    async def run(self) -> None:
        """Runs until a process ends that is not started again. Then raises as Supervisor.check does."""
        while True:
            await self.step()
            await asyncio.sleep(_POLL_S)

    async def step(self) -> None:
        """Looks at all processes once."""
        for child in self._supervisor.unexpected_ends():
            self._ended(child)
        for worker in self._workers.values():
            if (
                worker.ended is not None
                and worker.due_s is not None
                and self._clock() >= worker.due_s
            ):
                worker.started(await self._supervisor.restart(worker.ended), self._clock())
            elif worker.starting is not None and worker.starting.read_port_file():
                child = worker.starting
                self._report(child, f"{child.spec.name} serves again on {child.endpoint}")
                worker.served()

    def _ended(self, child: Child) -> None:
        name, now_s = child.spec.name, self._clock()
        worker = self._workers.setdefault(name, _Worker())
        worker.forget_before(now_s - self._policy.window_s)
        number = len(worker.started_s) + 1
        if child.spec.service not in RESTARTED or number > self._policy.count_max:
            raise unexpected_end(child)
        delay_s = self._policy.delay_s(number)
        worker.schedule(child, now_s + delay_s)
        child.mark_replaced()
        self._report(
            child,
            f"{end_text(child)}; it starts again in {delay_s:g} s (restart {number} of {self._policy.count_max})",
        )

    def _report(self, child: Child, text: str) -> None:
        log_line(child.spec.log_file, text)
        self._console.print(text, markup=False)
