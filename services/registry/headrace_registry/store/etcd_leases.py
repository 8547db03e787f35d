"""The leases of members in etcd, their renewal in batches, and the records that vanished before a lease ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from headrace_common.errors import HeadraceError, RegistryUnavailable
from headrace_common.tasks import end_task


class MemberLeases:
    """Each member has one lease, and each lease one member. A lookup takes the same time for any number of them."""

    def __init__(self) -> None:
        self._by_worker: dict[str, int] = {}
        self._by_lease: dict[int, str] = {}

    def put(self, worker_id: str, lease: int) -> None:
        """Sets the lease of a member. 0 means none."""
        self.pop(worker_id)
        if lease:
            self._by_worker[worker_id] = lease
            self._by_lease[lease] = worker_id

    def pop(self, worker_id: str) -> int:
        """Removes a member. Returns its lease, 0 for an unknown member."""
        lease = self._by_worker.pop(worker_id, 0)
        if self._by_lease.get(lease) == worker_id:
            del self._by_lease[lease]
        return lease

    def worker_of(self, lease: int) -> str | None:
        """The member with a lease."""
        return self._by_lease.get(lease)

    def take_all(self) -> Mapping[str, int]:
        """Removes all members. Returns their leases by worker id."""
        taken, self._by_worker, self._by_lease = self._by_worker, {}, {}
        return taken


_log = logging.getLogger(__name__)

# All members of the cluster have applied the end of a lease by then.
_SETTLE_S: Final = 1.0
# After an outage many members may expire at once. Each costs one call.
_CHECKED_MAX: Final = 256


class VanishedMembers:
    """Logs removed members with a lease that lives: etcd lost data, or another program deleted keys."""

    def __init__(
        self, live_leases: Callable[[Collection[int]], Awaitable[Collection[int]]]
    ) -> None:
        """`live_leases` returns those of the leases that exist, or raises RegistryUnavailable."""
        self._live_leases = live_leases
        self._removed: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def check(self, removed: Mapping[str, int]) -> None:
        """Checks the leases, by worker id, of members that were removed. Returns at once."""
        for worker_id, lease in removed.items():
            if lease and len(self._removed) < _CHECKED_MAX:
                self._removed[worker_id] = lease
        if self._removed and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._report(), name="etcd-losses")

    async def close(self) -> None:
        """Stops checking."""
        await end_task(self._task)

    async def _report(self) -> None:
        while self._removed:
            await asyncio.sleep(_SETTLE_S)
            removed, self._removed = self._removed, {}
            try:
                live = await self._live_leases(tuple(removed.values()))
            except RegistryUnavailable as error:
                _log.debug("the leases of removed members are not known: %s", error.detail)
                continue
            vanished = sorted(name for name, lease in removed.items() if lease in live)
            if vanished:
                _log.error(
                    "etcd lost the records of %d members before their leases ended, such as %s. They register again. "
                    "Does another program delete keys?",
                    len(vanished),
                    ", ".join(vanished[:5]),
                )


# A renewal may wait that long for others. It is short beside the shortest time to live.
_COLLECT_S: Final = 0.02
_LEASES_PER_CALL: Final = 512

RenewAll = Callable[[Collection[int]], Awaitable[Mapping[int, float]]]
"""Renews leases. Returns the seconds to live of those that exist. Raises HeadraceError."""


class BatchedRenewals:
    """One event loop owns it. A call costs about 1 ms of CPU, however many leases it renews."""

    def __init__(self, renew_all: RenewAll) -> None:
        self._renew_all = renew_all
        self._waiting: dict[int, asyncio.Future[float | None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def renew(self, lease: int) -> float | None:
        """Renews a lease. Returns its seconds to live, or None when it does not exist. Raises as the call does."""
        future = self._waiting.get(lease)
        if future is None:
            future = self._waiting[lease] = asyncio.get_running_loop().create_future()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="etcd-renewals")
        # Another caller may wait for the same lease.
        return await asyncio.shield(future)

    async def close(self) -> None:
        """Ends the renewals that wait."""
        await end_task(self._task)
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()

    async def _run(self) -> None:
        while self._waiting:
            await asyncio.sleep(_COLLECT_S)
            leases = list(self._waiting)[:_LEASES_PER_CALL]
            batch = {lease: self._waiting.pop(lease) for lease in leases}
            try:
                left_s = await self._renew_all(batch.keys())
            except HeadraceError as error:
                for future in batch.values():
                    future.set_exception(error)
                    # A caller that was cancelled does not read it.
                    future.exception()
            else:
                for lease, future in batch.items():
                    future.set_result(left_s.get(lease))
