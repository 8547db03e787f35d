"""Renews the leases of all members of one process together."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc.aio

from headrace.registry.v1 import registry_pb2
from headrace_common.errors import HeadraceError
from headrace_common.limits import LEASES_PER_RENEWAL_MAX
from headrace_common.registry.link import RegistryLink
from headrace_common.tasks import end_task


class LeaseRenewals:
    """One stream for all leases, with one message for all of them in each interval. One event loop owns it."""

    def __init__(self, registry: grpc.aio.Channel, interval_s: float) -> None:
        """`interval_s` must be well below the time to live of every lease."""
        self._link = RegistryLink(registry, "lease renewals")
        self._interval_s = interval_s
        self._kept: dict[str, asyncio.Future[None]] = {}
        self._task: asyncio.Task[None] | None = None

    async def keep(self, lease_id: str) -> None:
        """Returns when the lease is lost. Raises RegistryUnavailable when the registry cannot be reached."""
        lost = asyncio.get_running_loop().create_future()
        self._kept[lease_id] = lost
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="lease renewals")
        try:
            await lost
        finally:
            self._kept.pop(lease_id, None)

    async def close(self) -> None:
        """Renews nothing any more."""
        await end_task(self._task)
        await self._link.close()

    async def _run(self) -> None:
        """Renews while there are leases. A failure ends every `keep` of now."""
        try:
            with self._link.converted_errors():
                await self._renew_on_stream(self._link.stub.KeepAlive())
        except HeadraceError as error:
            for lost in list(self._kept.values()):
                if not lost.done():
                    lost.set_exception(error)
            self._kept.clear()

    async def _renew_on_stream(self, call: Any) -> None:
        ended = asyncio.Event()
        call.add_done_callback(lambda _: ended.set())
        try:
            while self._kept:
                lease_ids = list(self._kept)
                for first in range(0, len(lease_ids), LEASES_PER_RENEWAL_MAX):
                    await self._renew(call, lease_ids[first : first + LEASES_PER_RENEWAL_MAX])
                self._link.record_success()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await ended.wait()
        finally:
            call.cancel()

    async def _renew(self, call: Any, lease_ids: list[str]) -> None:
        async with asyncio.timeout(self._interval_s):
            await call.write(registry_pb2.KeepAliveRequest(lease_ids=lease_ids))
            response = await call.read()
        if not isinstance(response, registry_pb2.KeepAliveResponse):
            raise self._link.unavailable("the registry ended the stream")
        for lease_id in response.ended_lease_ids:
            lost = self._kept.get(lease_id)
            if lost is not None and not lost.done():
                lost.set_result(None)
