"""Renews leases in etcd together: one call for all that are to be renewed at nearly the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from headrace_common.errors import HeadraceError
from headrace_common.tasks import end_task

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
