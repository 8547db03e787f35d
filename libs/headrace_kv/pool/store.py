"""The shared store: Mooncake Store's client. Its process has no other listeners that Mooncake opened.

The store authenticates no client: a host that reaches its ports reads, changes and removes every block.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any, Final, cast

from headrace_common.errors import TransferFailed
from headrace_kv.pool.memory import SharedArena, Slots
from headrace_kv.transport.guard import (
    Networks,
    open_listeners,
    resolve_host,
    restrict_listeners,
)
from headrace_kv.transport.mooncake import without_known_lines

STORED: Final = 0
ABSENT: Final = -704
PRESENT: Final = -705
"""Status codes of Mooncake Store."""

# The client allocates from it only in calls that copy, which are not used here. It must not be empty.
_OWN_BUFFER_BYTES: Final = 16 << 20
_METADATA: Final = "P2PHANDSHAKE"
_SETTLED_S: Final = 0.05


class MooncakeStore:
    """A client of the master at `master`. It reads and writes memory by address, which was registered before.

    Packets to its ports are admitted from `sources` only, and to `host` only. None admits every source. Raises
    TransferFailed when the master does not answer or refuses.
    """

    def __init__(
        self,
        host: str,
        master: str,
        *,
        protocol: str,
        rdma_devices: str = "",
        sources: Networks | None = None,
    ) -> None:
        from mooncake.store import MooncakeDistributedStore

        known = open_listeners()
        self._store: Any = MooncakeDistributedStore()
        self._protocol = protocol
        with without_known_lines():
            code = self._store.setup(
                host, _METADATA, 0, _OWN_BUFFER_BYTES, protocol, rdma_devices, master
            )
        self._restrict(known, host, sources)
        if code != 0:
            raise TransferFailed(f"the store at {master} cannot be used (code {code})")

    def offer(self, memory: SharedArena) -> None:
        """Lets all clients of the master store objects there. Raises TransferFailed."""
        path, nbytes = f"/proc/self/fd/{memory.descriptor}", len(memory.bytes)
        code = self._store.mount_segment(path, nbytes, 0, self._protocol)["ret"]
        if code != 0:
            raise TransferFailed(f"Mooncake cannot offer {nbytes} bytes (code {code})")

    def register(self, memories: Sequence[Slots]) -> None:
        """Lets calls use this memory. Raises TransferFailed."""
        for memory in memories:
            code = self._store.register_buffer(
                memory.address, memory.slot_bytes * memory.slot_count
            )
            if code != 0:
                raise TransferFailed(
                    f"Mooncake cannot register {memory.slot_bytes * memory.slot_count} bytes (code {code})"
                )

    def exist(self, keys: list[str]) -> list[int]:
        """1 for a key that is there, 0 for one that is not, else a status code."""
        return cast("list[int]", self._store.batch_is_exist(keys))

    def get(self, keys: list[str], addresses: list[int], nbytes: int) -> list[int]:
        """Reads objects of at most `nbytes` each. Returns their sizes, or a status code."""
        return cast("list[int]", self._store.batch_get_into(keys, addresses, [nbytes] * len(keys)))

    def put(self, keys: list[str], addresses: list[int], nbytes: int) -> list[int]:
        """Stores objects. Returns STORED or a status code."""
        return cast("list[int]", self._store.batch_put_from(keys, addresses, [nbytes] * len(keys)))

    def remove(self, keys: list[str]) -> None:
        """Removes objects, if they are there."""
        self._store.batch_remove(keys, True)

    def close(self) -> None:
        """Leaves the store. The memory that it has offered is gone then."""
        self._store.close()

    @staticmethod
    def _restrict(known: Collection[int], host: str, sources: Networks | None) -> None:
        addresses = resolve_host(host)
        restrict_listeners(known, addresses, sources)
        # Mooncake opens a port on a thread of its own.
        time.sleep(_SETTLED_S)
        restrict_listeners(known, addresses, sources)
