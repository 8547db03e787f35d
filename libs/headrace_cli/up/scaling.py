"""Starts and drains workers until as many run as a planner's target says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final

from rich.console import Console

from headrace_cli.up.supervisor import Child, Supervisor
from headrace_cli.up.topology import ProcessSpec
from headrace_common.errors import HeadraceError

ROLES: Final = ("prefill", "decode")
START_TIMEOUT_S: Final = 600.0
"""Limit of a worker's start: engines load models for minutes."""

MakeSpec = Callable[[str, str, int], ProcessSpec]
"""A process of workers, by service, name and number of workers."""


@dataclass(frozen=True, slots=True)
class SharedProcesses:
    """Where processes have several workers: which roles, and how one of these workers is found and drained."""

    roles: frozenset[str]
    """The workers that a target adds of such a role share a process."""
    registered: Callable[[], Awaitable[Collection[str]]]
    """Returns the ids of the workers that take requests."""
    drain: Callable[[str], Awaitable[None]]
    """Drains a worker by its id, and returns when it has ended."""


@dataclass(frozen=True, slots=True)
class _Process:
    """A process, and the ids of its workers that take requests or start again."""

    child: Child
    workers: tuple[str, ...]


class Scaler:
    """Adds and removes workers of a supervisor. Its state is that of the supervisor and of the registry."""

    def __init__(
        self,
        supervisor: Supervisor,
        make_spec: MakeSpec,
        console: Console,
        drain_timeout_s: Callable[[str], float],
        shared: SharedProcesses,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`drain_timeout_s` returns the limit of a drain, by service."""
        self._supervisor = supervisor
        self._make_spec = make_spec
        self._console = console
        self._drain_timeout_s = drain_timeout_s
        self._shared = shared
        self._start_timeout_s = start_timeout_s

    async def counts(self) -> tuple[int, int]:
        """The prefill and decode workers that run or start again. Raises as `shared.registered` does."""
        registered = await self._registered()
        prefill, decode = (
            sum(len(process.workers) for process in self._processes(role, registered))
            for role in ROLES
        )
        return prefill, decode

    async def apply(self, prefill: int, decode: int) -> None:
        """Returns when that many workers run: all that were added serve, and all that were removed have ended.

        Removals come first, because an added worker may need their devices. Raises HeadraceError for the first worker
        that could not be started or did not drain, after all others.
        """
        registered = await self._registered()
        drains, additions = [], []
        for role, wanted in zip(ROLES, (prefill, decode), strict=True):
            processes = self._processes(role, registered)
            drains += self._drains(processes, wanted)
            missing = wanted - sum(len(process.workers) for process in processes)
            additions += self._additions(role, processes, missing)
        await self._all(drains)
        await self._all([self._add(*one) for one in additions])

    async def _registered(self) -> frozenset[str]:
        """The registered workers, if any process has several."""
        several = any(child.spec.worker_count > 1 for child in self._supervisor.children)
        return frozenset(await self._shared.registered()) if several else frozenset()

    def _processes(self, role: str, registered: frozenset[str]) -> list[_Process]:
        """The processes of a role, those with the highest numbers last. Processes that start again count too."""
        found = [
            _Process(child, _workers_of(child, registered))
            for child in self._supervisor.children
            if child.spec.service == role and not child.stopping
        ]
        # A worker that has ended is started again by its name, and cannot be drained.
        return sorted(found, key=lambda one: (one.child.running, _number(one.child.spec.name)))

    def _drains(self, processes: list[_Process], wanted: int) -> list[Coroutine[Any, Any, None]]:
        """The drains of all workers after the first `wanted`. A process that keeps no worker ends by SIGTERM."""
        drains: list[Coroutine[Any, Any, None]] = []
        for process in processes:
            kept = min(wanted, len(process.workers))
            wanted -= kept
            if not process.child.running or kept == len(process.workers):
                continue
            if kept:
                drains += [self._drain_worker(name) for name in process.workers[kept:]]
            else:
                drains.append(self._drain(process.child))
        return drains

    def _additions(
        self, role: str, processes: list[_Process], missing: int
    ) -> list[tuple[str, str, int]]:
        """Role, name and number of workers of each process to add, with the lowest free numbers."""
        if missing < 1:
            return []
        children = [child for child in self._supervisor.children if child.running]
        children += [process.child for process in processes]
        taken = {name for child in children for name in (child.spec.name, *child.spec.worker_names)}
        free = (name for number in count() if (name := f"{role}-{number}") not in taken)
        if role in self._shared.roles:
            return [(role, next(free), missing)]
        return [(role, next(free), 1) for _ in range(missing)]

    async def _drain(self, child: Child) -> None:
        self._console.print(f"the planner removes {child.spec.name}", markup=False)
        await self._supervisor.drain(child, self._drain_timeout_s(child.spec.service))

    async def _drain_worker(self, name: str) -> None:
        self._console.print(f"the planner removes {name}", markup=False)
        await self._shared.drain(name)

    async def _add(self, role: str, name: str, worker_count: int) -> None:
        workers = "" if worker_count == 1 else f" with {worker_count} workers"
        self._console.print(f"the planner adds {name}{workers}", markup=False)
        # An earlier worker may have had the name.
        spec = replace(self._make_spec(role, name, worker_count), keeps_log=True)
        child = await self._supervisor.add(spec, self._start_timeout_s)
        self._console.print(f"{name} serves on {child.endpoint}", markup=False)

    async def _all(self, work: list[Coroutine[Any, Any, None]]) -> None:
        """Raises the first HeadraceError when all have ended, and any other error."""
        results = await asyncio.gather(*work, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in sorted(failures, key=lambda one: isinstance(one, HeadraceError)):
            raise failure


def _workers_of(child: Child, registered: frozenset[str]) -> tuple[str, ...]:
    """The workers of a process, without those that it no longer has. All of them while it starts."""
    names = child.spec.worker_names
    if len(names) == 1 or not child.running or not child.endpoint:
        return names
    return tuple(name for name in names if name in registered)


def _number(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
