"""The target in force: published, watched, acknowledged."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from headrace_common.errors import Draining, NotFound
from headrace_planner.observation import WorkerCounts


@dataclass(frozen=True, slots=True)
class Target:
    """Numbers of workers that should run, decided from `current`. `number` is that of the decision."""

    id: str
    number: int
    current: WorkerCounts
    counts: WorkerCounts
    decided_unix_s: float


class TargetBoard:
    """Owns the target in force. `planner` is the id of this start of the planner: a later start has other targets.

    One event loop owns it.
    """

    def __init__(self, planner: str) -> None:
        self._planner = planner
        self._target: Target | None = None
        self._pending = False
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def target(self) -> Target | None:
        """The target in force, None before the first."""
        return self._target

    @property
    def pending(self) -> bool:
        """Whether the target waits for its acknowledgement."""
        return self._pending

    def publish(
        self, number: int, current: WorkerCounts, counts: WorkerCounts, decided_unix_s: float
    ) -> Target:
        """Replaces the target by that of a decision."""
        self._target = Target(f"{self._planner}-{number}", number, current, counts, decided_unix_s)
        self._pending = True
        self._wake()
        return self._target

    def settle(self) -> None:
        """The target waits for no acknowledgement any more."""
        self._pending = False

    def require(self, target_id: str) -> Target:
        """The target in force. Raises NotFound when it has another id."""
        if self._target is None or self._target.id != target_id:
            in_force = self._target.id if self._target is not None else "none"
            raise NotFound(
                f"{target_id} is not the target in force, which is {in_force}: watch the targets again",
                metadata={"target_id": target_id, "in_force": in_force},
            )
        return self._target

    async def wait_other(self, seen_id: str) -> Target:
        """The target in force, once its id differs from `seen_id`. Raises Draining after `close`."""
        while True:
            if self._closed:
                raise Draining("the planner shuts down")
            if self._target is not None and self._target.id != seen_id:
                return self._target
            await self._changed.wait()

    def close(self) -> None:
        """Ends every wait."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
