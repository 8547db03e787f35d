"""What every process needs of the registry: to be a member, to see the others, to know their KV
memory.

All three live through a registry that goes away and comes back, empty or not (I7). They take the
registry's "host:port", or a channel that the caller opened and closes after stopping them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from typing import Final

import grpc.aio

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import (
    HeadraceError,
    RegistryUnavailable,
)
from headrace_common.registry.link import CALL_TIMEOUT_S, RegistryLink, end_task, run_forever

_log = logging.getLogger(__name__)

_STOP_TIMEOUT_S: Final = 2.0


class Membership:
    """Keeps one member registered from `start` to `stop`, with its KV descriptor if it has one."""

    def __init__(
        self,
        registry: str | grpc.aio.Channel,
        member: registry_pb2.Member,
        ttl_s: float = 10.0,
        descriptor: layout_pb2.KvDescriptor | None = None,
    ) -> None:
        self._link = RegistryLink(registry, f"membership of {member.worker_id}")
        self._member = member
        self._descriptor = descriptor
        self._ttl = duration_from_seconds(ttl_s)
        self._interval_s = ttl_s / 3
        self._lease_id = ""
        self._prefix_hash_key = 0
        self._ticket_key = b""
        self._keeper: asyncio.Task[None] | None = None

    @property
    def prefix_hash_key(self) -> int:
        """The deployment's key for hashes of prompt prefixes: the first one given. 0 before `start` is through."""
        return self._prefix_hash_key

    @property
    def ticket_key(self) -> bytes:
        """The deployment's key for tickets: the last one given. Empty before `start` is through."""
        return self._ticket_key

    @property
    def registered(self) -> bool:
        """Whether the registry knew this member when last heard of."""
        return bool(self._lease_id)

    async def start(self, timeout_s: float = 15.0) -> None:
        """Registers, then stays registered by itself.

        Raises RegistryUnavailable when the registry cannot be reached in time, InvalidRequest when
        it refuses the record, Conflict when a newer incarnation of the worker is there.
        """
        deadline = Deadline.after(timeout_s)
        while True:
            try:
                await self._register(min(CALL_TIMEOUT_S, max(0.1, deadline.remaining_s())))
                break
            except RegistryUnavailable as error:
                if deadline.expired:
                    raise
                await self._link.back_off(error)
        self._link.succeeded()
        name = f"membership-{self._member.worker_id}"
        self._keeper = run_forever(self._keep(), name)

    async def stop(self) -> None:
        """Leaves the registry, at once if it can be reached and by expiry otherwise."""
        await end_task(self._keeper)
        self._keeper = None
        if self._lease_id:
            request = registry_pb2.DeregisterRequest(lease_id=self._lease_id)
            self._lease_id = ""
            try:
                with self._link.errors():
                    await self._link.stub.Deregister(request, timeout=_STOP_TIMEOUT_S)
            except HeadraceError as error:
                _log.warning("%s stays until its lease ends: %s", self._member.worker_id, error)
        await self._link.close()

    async def _keep(self) -> None:
        while True:
            try:
                if not self._lease_id:
                    await self._register()
                await self._keep_alive()
                self._lease_id = ""
                # All members find out at once when a registry has forgotten them.
                await asyncio.sleep(random.uniform(0.0, 0.2))
            except HeadraceError as error:
                await self._link.back_off(error)

    async def _register(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        request = registry_pb2.RegisterRequest(
            member=self._member,
            ttl=self._ttl,
            prefix_hash_key=self._prefix_hash_key,
            ticket_key=self._ticket_key,
        )
        with self._link.errors():
            granted = await self._link.stub.Register(request, timeout=timeout_s)
            # From this moment others call the member, and it has to know their tickets.
            self._take_key(granted.prefix_hash_key)
            self._ticket_key = granted.ticket_key
            if self._descriptor is not None:
                reference = registry_pb2.MemberRef(
                    worker_id=self._member.worker_id, incarnation=self._member.incarnation
                )
                put = registry_pb2.PutKvDescriptorRequest(
                    lease_id=granted.lease_id, member=reference, descriptor=self._descriptor
                )
                await self._link.stub.PutKvDescriptor(put, timeout=timeout_s)
        self._lease_id = granted.lease_id

    def _take_key(self, key: int) -> None:
        """What was hashed with the first key cannot be hashed again, so it stays."""
        if not self._prefix_hash_key:
            self._prefix_hash_key = key
        elif key != self._prefix_hash_key:
            _log.warning(
                "%s: the registry has another prefix_hash_key now: cached prefixes that one side of it announces are "
                "not found by the other until these restart",
                self._member.worker_id,
            )

    async def _keep_alive(self) -> None:
        """Returns when the lease is gone; raises when the registry is."""
        call = self._link.stub.KeepAlive()
        ended = asyncio.Event()
        call.add_done_callback(lambda _: ended.set())
        request = registry_pb2.KeepAliveRequest(lease_id=self._lease_id)
        try:
            while True:
                with self._link.errors():
                    async with asyncio.timeout(self._interval_s):
                        await call.write(request)
                        response = await call.read()
                if not isinstance(response, registry_pb2.KeepAliveResponse):
                    raise self._link.unavailable("it ended the stream")
                if not response.HasField("ttl"):
                    return
                self._link.succeeded()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await ended.wait()
        finally:
            call.cancel()
