"""Channels to decode workers, kept for the next request."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc.aio

from headrace_common.errors import WorkerGone
from headrace_common.rpc.channel import TlsFiles, open_channel

_IDLE_MAX: Final = 64
_CONNECT_TIMEOUT_S: Final = 2.0
_CLOSED_S: Final = 30.0


@dataclass(slots=True)
class _Kept:
    channel: grpc.aio.Channel
    users: int = 0


class Channels:
    """One channel per endpoint; of those that nobody uses, the 64 used last stay open.

    After an endpoint could not be reached, the workers' network is taken for closed to us for a while.
    """

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._closed_until_s = 0.0

    @property
    def out_of_reach(self) -> bool:
        """Whether it is not worth trying now."""
        return time.monotonic() < self._closed_until_s

    @asynccontextmanager
    async def to(self, endpoint: str) -> AsyncIterator[grpc.aio.Channel]:
        """A connected channel. Raises WorkerGone when there is no connection in time."""
        kept = self._kept.setdefault(endpoint, _Kept(open_channel(endpoint, self._tls)))
        self._kept.move_to_end(endpoint)
        kept.users += 1
        try:
            await self._connect(kept.channel, endpoint)
            yield kept.channel
        finally:
            kept.users -= 1
            await self._close_surplus()

    async def close(self) -> None:
        """Closes all of them."""
        kept, self._kept = list(self._kept.values()), OrderedDict()
        for entry in kept:
            await entry.channel.close()

    async def _close_surplus(self) -> None:
        idle = [endpoint for endpoint, kept in self._kept.items() if not kept.users]
        for endpoint in idle[: max(0, len(idle) - _IDLE_MAX)]:
            await self._kept.pop(endpoint).channel.close()

    async def _connect(self, channel: grpc.aio.Channel, endpoint: str) -> None:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await channel.channel_ready()
        except TimeoutError:
            self._closed_until_s = time.monotonic() + _CLOSED_S
            raise WorkerGone(
                f"no connection to {endpoint} within {_CONNECT_TIMEOUT_S:g} s",
                metadata={"endpoint": endpoint},
            ) from None
