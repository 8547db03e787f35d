"""Keeps a process registered: registers it, keeps its lease alive, registers it again when the lease is lost."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Any, Final

import grpc.aio

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import (
    Draining,
    HeadraceError,
    NotFound,
    QueueFull,
    RegistryUnavailable,
)
from headrace_common.limits import LEASES_PER_RENEWAL_MAX
from headrace_common.registry.link import CALL_TIMEOUT_S, RegistryLink
from headrace_common.tasks import end_task, run_forever, wait_briefly


class LeaseRenewals:
    """One stream for all leases, with one message for all of them in each interval. One event loop owns it."""

    def __init__(self, registry: grpc.aio.Channel, interval_s: float) -> None:
        """`interval_s` must be well below the time to live of every lease."""
        self._link = RegistryLink(registry, "lease renewals")
        self._interval_s = interval_s
        self._kept: dict[str, tuple[asyncio.Future[None], Callable[[], None]]] = {}
        self._task: asyncio.Task[None] | None = None

    async def keep(self, lease_id: str, on_renewed: Callable[[], None]) -> None:
        """Returns when the lease is lost. Raises RegistryUnavailable when the registry cannot be reached."""
        lost = asyncio.get_running_loop().create_future()
        self._kept[lease_id] = lost, on_renewed
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="lease renewals")
        try:
            await lost
        finally:
            self._kept.pop(lease_id, None)

    async def close(self) -> None:
        """Renews nothing any more."""
        await end_task(self._task)

    async def _run(self) -> None:
        """Renews while there are leases. A failure ends every `keep` of now."""
        try:
            with self._link.converted_errors():
                await self._renew_on_stream(self._link.stub.KeepAlive())
        except Exception as error:  # noqa: BLE001 - each `keep` raises it
            for lost, _ in list(self._kept.values()):
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
                await wait_briefly(ended.wait(), self._interval_s)
        finally:
            call.cancel()

    async def _renew(self, call: Any, lease_ids: list[str]) -> None:
        request = registry_pb2.KeepAliveRequest(lease_ids=lease_ids)
        if len(lease_ids) == 1:
            # The registry of the previous release renews one lease in a message.
            request = registry_pb2.KeepAliveRequest(lease_id=lease_ids[0])
        async with asyncio.timeout(self._interval_s):
            await call.write(request)
            response = await call.read()
        if not isinstance(response, registry_pb2.KeepAliveResponse):
            raise self._link.unavailable("the registry ended the stream")
        ended = set(response.ended_lease_ids)
        if not response.HasField("ttl"):
            ended.add(response.lease_id)
        for lease_id in self._kept.keys() & lease_ids:
            lost, on_renewed = self._kept[lease_id]
            if lease_id not in ended:
                on_renewed()
            elif not lost.done():
                lost.set_result(None)


_log = logging.getLogger(__name__)

_STOP_TIMEOUT_S: Final = 2.0
_START_CALL_TIMEOUT_MIN_S: Final = 0.1
# Members find out at the same time that a registry has lost their leases.
_REREGISTER_DELAY_MAX_S: Final = 0.2


class Membership:
    """Keeps one member registered from `start` to `stop`, with its KV descriptor if it has one."""

    def __init__(
        self,
        registry: grpc.aio.Channel,
        member: registry_pb2.Member,
        ttl_s: float = 10.0,
        descriptor: layout_pb2.KvDescriptor | None = None,
        renewals: LeaseRenewals | None = None,
    ) -> None:
        """`renewals` renews the leases of all members of the process; without it, this member has its own stream."""
        self._link = RegistryLink(registry, f"membership of {member.worker_id}")
        self._own_renewals = None
        if renewals is None:
            renewals = self._own_renewals = LeaseRenewals(registry, ttl_s / 3)
        self._renewals = renewals
        self._member = member
        self._descriptor = descriptor
        self._ttl = duration_from_seconds(ttl_s)
        self._lease_id = ""
        self._registration_order = 0
        self.prefix_hash_key = 0
        """The deployment's key for hashes of prompt prefixes: the first one received. 0 until `start` returns."""
        self._keeper: asyncio.Task[None] | None = None
        self._changes = asyncio.Lock()

    @property
    def registered(self) -> bool:
        """Whether this member holds a lease, as of the registry's last response."""
        return bool(self._lease_id)

    async def start(self, timeout_s: float = 15.0) -> None:
        """Registers the member, then keeps it registered in the background.

        Raises RegistryUnavailable when the registry cannot be reached in time, InvalidRequest when the registry
        rejects the record, Conflict when a newer incarnation is registered. Raises NotFound when no lease lasts until
        the descriptor is published.
        """
        deadline = Deadline.after(timeout_s)
        while True:
            try:
                await self._register(
                    min(CALL_TIMEOUT_S, max(_START_CALL_TIMEOUT_MIN_S, deadline.remaining_s()))
                )
                break
            # The lease may end before the descriptor arrives, for instance when etcd stands still. A member that
            # registers too often may do so in a moment.
            except (RegistryUnavailable, NotFound, QueueFull) as error:
                if deadline.expired:
                    raise
                await self._link.back_off(error)
        self._link.record_success()
        self._keep()

    def _keep(self) -> None:
        name = f"membership-{self._member.worker_id}"
        self._keeper = run_forever(self._stay_registered, name)

    async def replace(self, member: registry_pb2.Member, timeout_s: float) -> None:
        """Registers a new record of the same incarnation at once, and keeps that from now on.

        Raises Draining unless the member is kept registered. Raises as `start` does; the background tries again then.
        """
        async with self._changes:
            if self._keeper is None:
                raise Draining(f"{member.worker_id} is not registered any more")
            self._member = member
            try:
                await end_task(self._keeper)
                await self.start(timeout_s)
            except BaseException:
                # Its lease may have been replaced.
                self._lease_id = ""
                self._keep()
                raise

    async def stop(self) -> None:
        """Deregisters the member. If the registry cannot be reached, the lease expires later."""
        async with self._changes:
            await end_task(self._keeper)
            self._keeper = None
        if self._lease_id:
            request = registry_pb2.DeregisterRequest(lease_id=self._lease_id)
            self._lease_id = ""
            try:
                with self._link.converted_errors():
                    await self._link.stub.Deregister(request, timeout=_STOP_TIMEOUT_S)
            except HeadraceError as error:
                _log.warning(
                    "%s stays registered until its lease expires: %s", self._member.worker_id, error
                )
        if self._own_renewals is not None:
            await self._own_renewals.close()

    async def _stay_registered(self) -> None:
        while True:
            try:
                if not self._lease_id:
                    await self._register()
                await self._renewals.keep(self._lease_id, self._link.record_success)
                self._lease_id = ""
                await asyncio.sleep(random.uniform(0.0, _REREGISTER_DELAY_MAX_S))
            except HeadraceError as error:
                await self._link.back_off(error)

    async def _register(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        request = registry_pb2.RegisterRequest(
            member=self._member,
            ttl=self._ttl,
            prefix_hash_key=self.prefix_hash_key,
            sent_unix_ns=time.time_ns(),
        )
        request.member.registration_order = self._registration_order
        with self._link.converted_errors():
            granted = await self._link.stub.Register(request, timeout=timeout_s)
            # Other processes call the member from now on, so it needs the key before its descriptor is published.
            self._store_prefix_hash_key(granted.prefix_hash_key)
            self._registration_order = granted.registration_order
            if self._descriptor is not None:
                reference = registry_pb2.MemberRef(
                    worker_id=self._member.worker_id, incarnation=self._member.incarnation
                )
                put = registry_pb2.PutKvDescriptorRequest(
                    lease_id=granted.lease_id, member=reference, descriptor=self._descriptor
                )
                await self._link.stub.PutKvDescriptor(put, timeout=timeout_s)
        self._lease_id = granted.lease_id

    def _store_prefix_hash_key(self, key: int) -> None:
        """Keeps the first key, because hashes made with it cannot be made again."""
        if not self.prefix_hash_key:
            self.prefix_hash_key = key
        elif key != self.prefix_hash_key:
            _log.warning(
                "%s: the registry has a different prefix_hash_key now. Processes with the old and the new key do not "
                "find each other's cached prefixes: restart those with the old one",
                self._member.worker_id,
            )
