"""A registry that its clients call within one event loop, without gRPC: for tests in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace_registry.service import RegistryServicer
from headrace_registry.store.base import MemoryStore
from tests.local_channel import LocalChannel


class LocalRegistry(LocalChannel):
    """A registry with its own memory, and the channel to it. `stop` loses the memory and ends every call."""

    def __init__(self) -> None:
        super().__init__()
        self.store: MemoryStore | None = None

    @property
    def members(self) -> list[str]:
        """The ids of the registered members."""
        assert self.store is not None
        return sorted(self.store.feed.members)

    def start(self) -> None:
        self.store = MemoryStore(history_size=64)
        self.servicer = RegistryServicer(self.store, 100, 100, registrations_per_s=100.0)

    async def stop(self) -> None:
        assert self.store is not None
        await self.store.close()
        self.store = None
        self.cut()


@asynccontextmanager
async def local_registry() -> AsyncIterator[LocalRegistry]:
    registry = LocalRegistry()
    registry.start()
    try:
        yield registry
    finally:
        if registry.store is not None:
            await registry.stop()
