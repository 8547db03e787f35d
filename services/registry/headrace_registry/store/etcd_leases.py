"""The leases of members in etcd, and their renewal in batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from headrace_common.errors import HeadraceError
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
