"""Finds records of members that vanished from etcd before the leases of the members ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from headrace_common.errors import RegistryUnavailable
from headrace_common.tasks import end_task

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
                    *(len(vanished), ", ".join(vanished[:5])),
                )
