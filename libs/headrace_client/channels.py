"""Channels to decode workers, reused by later requests."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc.aio

from headrace_common.access.credentials import TlsFiles
from headrace_common.errors import WorkerGone
from headrace_common.rpc.channel import open_channel

_IDLE_MAX: Final = 64
_CONNECT_TIMEOUT_S: Final = 2.0
_UNREACHABLE_S: Final = 30.0


@dataclass(slots=True)
class _Entry:
    channel: grpc.aio.Channel
    users: int = 0

    def acquire(self) -> None:
        """A request uses the channel."""
        self.users += 1

    def release(self) -> None:
        """A request no longer uses the channel."""
        self.users -= 1


class Channels:
    """One channel per endpoint. Of the unused channels, the 64 used last stay open.

    After an endpoint could not be reached, all workers count as unreachable for 30 s.
    """

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._unreachable_until_s = 0.0

    @property
    def unreachable(self) -> bool:
        """Whether the last failed connection was less than 30 s ago."""
        return time.monotonic() < self._unreachable_until_s

    @asynccontextmanager
    async def open(self, endpoint: str) -> AsyncIterator[grpc.aio.Channel]:
        """A connected channel. Raises WorkerGone when it does not connect in time."""
        entry = self._entries.get(endpoint)
        if entry is None:
            entry = self._entries[endpoint] = _Entry(open_channel(endpoint, self._tls))
        self._entries.move_to_end(endpoint)
        entry.acquire()
        try:
            await self._connect(entry.channel, endpoint)
            yield entry.channel
        finally:
            entry.release()
            await self._close_surplus()

    async def close(self) -> None:
        """Closes all channels."""
        entries, self._entries = list(self._entries.values()), OrderedDict()
        for entry in entries:
            await entry.channel.close()

    async def _close_surplus(self) -> None:
        idle = [endpoint for endpoint, entry in self._entries.items() if not entry.users]
        for endpoint in idle[: max(0, len(idle) - _IDLE_MAX)]:
            await self._entries.pop(endpoint).channel.close()

    async def _connect(self, channel: grpc.aio.Channel, endpoint: str) -> None:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await channel.channel_ready()
        except TimeoutError:
            self._unreachable_until_s = time.monotonic() + _UNREACHABLE_S
            raise WorkerGone(
                f"no connection to {endpoint} within {_CONNECT_TIMEOUT_S:g} s",
                metadata={"endpoint": endpoint},
            ) from None
