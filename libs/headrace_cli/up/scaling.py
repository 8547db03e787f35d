"""Starts and drains workers until as many run as a planner's target says. Each worker has a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import count, islice
from typing import Any, Final

from rich.console import Console

from headrace_cli.up.supervisor import Child, Supervisor
from headrace_cli.up.topology import ProcessSpec
from headrace_common.errors import HeadraceError

ROLES: Final = ("prefill", "decode")
START_TIMEOUT_S: Final = 600.0
"""Limit of a worker's start: engines load models for minutes."""

MakeSpec = Callable[[str, str], ProcessSpec]
"""A worker, by service and name."""


class Scaler:
    """Adds and removes workers of a supervisor, and has no state of its own."""

    def __init__(
        self,
        supervisor: Supervisor,
        make_spec: MakeSpec,
        console: Console,
        drain_timeout_s: Callable[[str], float],
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`drain_timeout_s` returns the limit of a drain, by service."""
        self._supervisor = supervisor
        self._make_spec = make_spec
        self._console = console
        self._drain_timeout_s = drain_timeout_s
        self._start_timeout_s = start_timeout_s

    def counts(self) -> tuple[int, int]:
        """The prefill and decode workers that run or start again."""
        prefill, decode = (len(self._workers(role)) for role in ROLES)
        return prefill, decode

    async def apply(self, prefill: int, decode: int) -> None:
        """Returns when that many workers run: all that were added serve, and all that were removed have ended.

        Removals come first, because an added worker may need their devices. Raises HeadraceError for the first worker
        that could not be started or did not drain, after all others.
        """
        wanted = dict(zip(ROLES, (prefill, decode), strict=True))
        workers = {role: self._workers(role) for role in ROLES}
        # A worker that has ended is started again by its name, and cannot be drained.
        surplus = [one for role in ROLES for one in workers[role][wanted[role] :] if one.running]
        await self._all([self._drain(child) for child in surplus])
        taken = {child.spec.name for role in ROLES for child in workers[role]}
        taken |= {child.spec.name for child in self._supervisor.children if child.running}
        added: list[Coroutine[Any, Any, None]] = []
        for role in ROLES:
            free = (name for name in map(f"{role}-{{}}".format, count()) if name not in taken)
            missing = max(0, wanted[role] - len(workers[role]))
            added += [self._add(role, name) for name in islice(free, missing)]
        await self._all(added)

    def _workers(self, role: str) -> list[Child]:
        """The workers of a role, those with the highest numbers last. Those that start again count too."""
        found = [
            child
            for child in self._supervisor.children
            if child.spec.service == role and not child.stopping
        ]
        return sorted(found, key=lambda child: (child.running, _number(child.spec.name)))

    async def _drain(self, child: Child) -> None:
        self._console.print(f"the planner removes {child.spec.name}", markup=False)
        await self._supervisor.drain(child, self._drain_timeout_s(child.spec.service))

    async def _add(self, role: str, name: str) -> None:
        self._console.print(f"the planner adds {name}", markup=False)
        # An earlier worker may have had the name.
        spec = replace(self._make_spec(role, name), keeps_log=True)
        child = await self._supervisor.add(spec, self._start_timeout_s)
        self._console.print(f"{name} serves on {child.endpoint}", markup=False)

    async def _all(self, work: list[Coroutine[Any, Any, None]]) -> None:
        """Raises the first HeadraceError when all have ended, and any other error."""
        results = await asyncio.gather(*work, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in sorted(failures, key=lambda one: isinstance(one, HeadraceError)):
            raise failure


def _number(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
