"""What a process stores for its tenants between their requests, within bounds of bytes, entries and time."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar

from headrace_frontend.config import FrontendConfig

ENTRIES_MAX: Final = 16_384
"""Of one tenant."""
KEEP_S: Final = 3_600.0
"""After the last use of an entry."""
_EXPIRY_INTERVAL_S: Final = 1.0

AskElsewhere: TypeAlias = Callable[[str, str, str, bytes], Awaitable[bytes | None]]
"""Asks other processes for the result of an operation on a tenant's entry: tenant, id, operation and arguments."""


async def nowhere(tenant: str, entry_id: str, operation: str, arguments: bytes) -> bytes | None:
    """For a process without others."""
    return None


@dataclass(slots=True, eq=False)
class Stored(ABC):
    """An entry of a tenant, under each of its ids."""

    ids: dict[str, int] = field(default_factory=dict)
    used_s: float = field(default=0.0, init=False)

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """What it takes of main memory, about."""

    def use(self, now_s: float) -> None:
        """It is used now."""
        self.used_s = now_s

    def end(self) -> None:  # noqa: B027
        """It is stored no more."""


Kind = TypeVar("Kind", bound=Stored)


class _TenantEntries:
    """The entries of one tenant."""

    def __init__(self) -> None:
        self.by_id: dict[tuple[type[Stored], str], Stored] = {}
        self._by_use: OrderedDict[Stored, int] = OrderedDict()
        """The bytes of each. The one that was not used for longest is the first."""
        self.stored_bytes = 0

    def __len__(self) -> int:
        return len(self._by_use)

    def use(self, entry: Stored, now_s: float) -> None:
        entry.use(now_s)
        self._by_use.move_to_end(entry)

    def put(self, entry: Stored, now_s: float) -> None:
        for entry_id in entry.ids:
            replaced = self.by_id.get((type(entry), entry_id))
            if replaced is not None and replaced is not entry:
                self.remove(type(entry), entry_id)
            self.by_id[type(entry), entry_id] = entry
        size = entry.stored_bytes
        self.stored_bytes += size - self._by_use.get(entry, 0)
        self._by_use[entry] = size
        self.use(entry, now_s)

    def remove(self, kind: type[Stored], entry_id: str) -> None:
        """Removes an id, and its entry when that has no other."""
        entry = self.by_id.pop((kind, entry_id))
        del entry.ids[entry_id]
        if not entry.ids:
            self._drop(entry)
            return
        self.stored_bytes += entry.stored_bytes - self._by_use[entry]
        self._by_use[entry] = entry.stored_bytes

    def drop_oldest(self) -> None:
        self._drop(next(iter(self._by_use)))

    def drop_unused(self, since_s: float) -> None:
        """Drops those that were not used since then."""
        while self._by_use and next(iter(self._by_use)).used_s < since_s:
            self.drop_oldest()

    def _drop(self, entry: Stored) -> None:
        self.stored_bytes -= self._by_use.pop(entry)
        for entry_id in entry.ids:
            del self.by_id[type(entry), entry_id]
        entry.ids.clear()
        entry.end()


class Store:
    """The entries of all tenants, each for `keep_s` after its last use. One event loop owns it.

    Without room in `bytes_max`, the tenant with the most bytes loses the entry that it did not use for longest. So none
    loses one while it has less than its equal share, and than `entries_max`. With 0 bytes, nothing is kept.
    `ask_elsewhere` finds the entries of other processes.
    """

    def __init__(
        self,
        bytes_max: int,
        keep_s: float,
        ask_elsewhere: AskElsewhere = nowhere,
        clock: Callable[[], float] = time.monotonic,
        entries_max: int = ENTRIES_MAX,
    ) -> None:
        self._bytes_max = bytes_max
        self._keep_s = keep_s
        self.ask_elsewhere = ask_elsewhere
        self._clock = clock
        self._entries_max = entries_max
        self._tenants: dict[str, _TenantEntries] = {}
        self._expired_s = clock()
        """When the entries of all tenants were last checked for their time."""

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything."""
        return self._bytes_max > 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(tenant.stored_bytes for tenant in self._tenants.values())

    def find(self, tenant: str, kind: type[Kind], entry_id: str) -> Kind | None:
        """A tenant's entry of this process, which counts as a use."""
        now_s = self._expire(tenant)
        kept = self._tenants.get(tenant)
        entry = None if kept is None else kept.by_id.get((kind, entry_id))
        if kept is None or not isinstance(entry, kind):
            return None
        kept.use(entry, now_s)
        return entry

    def put(self, tenant: str, entry: Stored) -> None:
        """Keeps a new entry, or one that has changed. It takes its ids from entries of its kind.

        One without ids was dropped, and stays so.
        """
        now_s = self._expire(tenant)
        if not entry.ids:
            return
        kept = self._tenants.setdefault(tenant, _TenantEntries())
        kept.put(entry, now_s)
        while len(kept) > self._entries_max:
            kept.drop_oldest()
        stored_bytes = self.stored_bytes
        while stored_bytes > self._bytes_max:
            largest = max(self._tenants, key=lambda name: self._tenants[name].stored_bytes)
            stored_bytes -= self._tenants[largest].stored_bytes
            self._tenants[largest].drop_oldest()
            stored_bytes += self._tenants[largest].stored_bytes
            self._remove_if_empty(largest)

    def remove(self, tenant: str, kind: type[Stored], entry_id: str) -> None:
        """Removes the id of an entry, and the entry when that has no other. Does nothing without such an entry."""
        if self.find(tenant, kind, entry_id) is not None:
            self._tenants[tenant].remove(kind, entry_id)
            self._remove_if_empty(tenant)

    def close(self) -> None:
        """Drops all entries."""
        for name in tuple(self._tenants):
            self._tenants.pop(name).drop_unused(math.inf)

    def _expire(self, tenant: str) -> float:
        """Drops a tenant's entries that have had their time, and once a second those of all tenants. Returns now."""
        now_s = self._clock()
        tenants = [tenant] if tenant in self._tenants else []
        if now_s >= self._expired_s + _EXPIRY_INTERVAL_S:
            self._expired_s = now_s
            tenants = list(self._tenants)
        for name in tenants:
            self._tenants[name].drop_unused(now_s - self._keep_s)
            self._remove_if_empty(name)
        return now_s

    def _remove_if_empty(self, tenant: str) -> None:
        if not len(self._tenants[tenant]):
            del self._tenants[tenant]


def new_store(config: FrontendConfig, ask_elsewhere: AskElsewhere = nowhere) -> Store:
    """The store that the settings describe."""
    return Store(config.conversations_mib * 1024**2, KEEP_S, ask_elsewhere)
