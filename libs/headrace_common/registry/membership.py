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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    HeadraceError,
    NotFound,
    RegistryUnavailable,
    StaleIncarnation,
    WatchExpired,
)
from headrace_common.registry.link import BACKOFF_MIN_S, RegistryLink, end_task, run_forever

_log = logging.getLogger(__name__)

_CALL_TIMEOUT_S: Final = 5.0
_STOP_TIMEOUT_S: Final = 2.0
_DESCRIPTORS_MAX: Final = 1024
# A worker is seen a moment before its descriptor is.
_DESCRIPTOR_SETTLE_S: Final = 0.5
# How often a descriptor is asked for that nobody needs yet.
_AHEAD_TRIES: Final = 50
_DEFAULT_RETRY_BUDGET: Final = 2


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
        self._ttl = Duration()
        self._ttl.FromNanoseconds(round(ttl_s * 1e9))
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
                await self._register(min(_CALL_TIMEOUT_S, max(0.1, deadline.remaining_s())))
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

    async def _register(self, timeout_s: float = _CALL_TIMEOUT_S) -> None:
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


class RegistryView:
    """Who is there and the policy in force, as last heard from the registry.

    While the registry is away the view stays as it was. When it comes back without its memory,
    members that it does not list stay for `grace_s`, in which they register again. `on_change` is
    called by the event loop soon after each change of members, policy or connection.
    """

    def __init__(
        self,
        registry: str | grpc.aio.Channel,
        on_change: Callable[[RegistryView], None] | None = None,
        grace_s: float = 10.0,
    ) -> None:
        self._link = RegistryLink(registry, "registry view")
        self._on_change = on_change
        self._grace_s = grace_s
        self._members: Mapping[str, registry_pb2.Member] = {}
        self._policy = registry_pb2.Policy(retry_budget=_DEFAULT_RETRY_BUDGET)
        self._revision = 0
        self._connected = False
        self._current = asyncio.Event()
        # Members that the last listing lacked.
        self._vanished: set[str] = set()
        self._grace: asyncio.TimerHandle | None = None
        self._follower: asyncio.Task[None] | None = None
        self._last_error: HeadraceError | None = None

    @property
    def members(self) -> Mapping[str, registry_pb2.Member]:
        """Members by worker id. The mapping is never changed: later views are other mappings."""
        return MappingProxyType(self._members)

    def of_role(self, role: registry_pb2.Member.Role.ValueType) -> tuple[registry_pb2.Member, ...]:
        """Members of one role, by worker id."""
        return tuple(member for _, member in sorted(self._members.items()) if member.role == role)

    @property
    def policy(self) -> registry_pb2.Policy:
        return self._policy

    @property
    def connected(self) -> bool:
        """Whether changes arrive at the moment."""
        return self._connected

    async def start(self, timeout_s: float = 15.0) -> None:
        """Waits for the first view. Raises RegistryUnavailable when none comes in time."""
        self._follower = run_forever(self._follow(), "registry-view")
        try:
            async with asyncio.timeout(timeout_s):
                await self._current.wait()
        except TimeoutError:
            await self.stop()
            raise self._last_error or self._link.unavailable("no view in time") from None

    async def stop(self) -> None:
        """Stops following. The last view stays readable."""
        await end_task(self._follower)
        self._follower = None
        self._connected = False
        if self._grace is not None:
            self._grace.cancel()
        await self._link.close()

    async def _follow(self) -> None:
        while True:
            try:
                await self._watch()
            except HeadraceError as error:
                self._last_error = error
                if isinstance(error, WatchExpired):
                    self._revision = 0
                if self._connected:
                    self._connected = False
                    self._notify()
                await self._link.back_off(error)

    async def _watch(self) -> None:
        """Applies responses until the watch ends, by an error."""
        request = registry_pb2.WatchRequest(start_revision=self._revision)
        call = self._link.stub.Watch(request)
        try:
            with self._link.errors():
                async with asyncio.timeout(_CALL_TIMEOUT_S):
                    response = await call.read()
            while isinstance(response, registry_pb2.WatchResponse):
                self._apply(response)
                with self._link.errors():
                    response = await call.read()
        finally:
            call.cancel()
        raise self._link.unavailable("it ended the watch")

    def _apply(self, response: registry_pb2.WatchResponse) -> None:
        members = dict(self._members)
        if response.HasField("snapshot"):
            listed = {member.worker_id: member for member in response.snapshot.members}
            self._vanished = set(members) - set(listed)
            members.update(listed)
            self._policy = response.snapshot.policy
        for change in response.changes:
            self._apply_change(members, change)
        self._members = members
        self._revision = response.revision
        arrived = not self._connected
        if arrived:
            self._connected = True
            self._link.succeeded()
            self._arm_grace()
        if arrived or response.changes:
            self._notify()
        self._current.set()

    def _apply_change(
        self, members: dict[str, registry_pb2.Member], change: registry_pb2.Change
    ) -> None:
        if change.HasField("member_put"):
            worker_id = change.member_put.worker_id
            members[worker_id] = change.member_put
            self._vanished.discard(worker_id)
        elif change.HasField("member_gone"):
            worker_id = change.member_gone.worker_id
            known = members.get(worker_id)
            if known is not None and known.incarnation == change.member_gone.incarnation:
                del members[worker_id]
                self._vanished.discard(worker_id)
        elif change.HasField("policy_put"):
            self._policy = change.policy_put

    def _arm_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if self._vanished:
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(self._grace_s, self._drop_vanished)

    def _drop_vanished(self) -> None:
        self._grace = None
        # While the registry is away again nobody can register again either.
        if self._connected:
            self._members = {
                worker_id: member
                for worker_id, member in self._members.items()
                if worker_id not in self._vanished
            }
            self._vanished = set()
            self._notify()

    def _notify(self) -> None:
        if self._on_change is not None:
            # By the loop itself, which logs a callback that fails: the watch goes on.
            asyncio.get_running_loop().call_soon(self._on_change, self)


class DescriptorCache:
    """KV memory of worker incarnations. Asked for once each: an incarnation's never changes."""

    def __init__(self, registry: str | grpc.aio.Channel) -> None:
        self._link = RegistryLink(registry, "KV descriptors")
        self._known: OrderedDict[tuple[str, str], layout_pb2.KvDescriptor] = OrderedDict()
        self._fetches: dict[tuple[str, str], asyncio.Task[layout_pb2.KvDescriptor]] = {}
        self._ahead: dict[tuple[str, str], int] = {}
        self._fetching_ahead: asyncio.Task[None] | None = None

    def foresee(self, members: Iterable[tuple[str, str]]) -> None:
        """Asks for these (worker id, incarnation) before anybody needs them, one after the other.

        So workers that have never met can meet while the registry is away.
        """
        self._ahead = {key: _AHEAD_TRIES for key in members if key not in self._known}
        if self._ahead and (self._fetching_ahead is None or self._fetching_ahead.done()):
            self._fetching_ahead = asyncio.create_task(self._fetch_ahead())

    async def get(
        self, worker_id: str, incarnation: str, deadline: Deadline
    ) -> layout_pb2.KvDescriptor:
        """The descriptor of one incarnation.

        Raises StaleIncarnation when the registry does not have it, RegistryUnavailable when the
        registry was away until the deadline.
        """
        key = (worker_id, incarnation)
        settled = Deadline.after(_DESCRIPTOR_SETTLE_S)
        while True:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
            try:
                return await self._fetch(key, deadline)
            except NotFound as error:
                if settled.expired or deadline.expired:
                    raise StaleIncarnation(
                        f"{worker_id}@{incarnation} is gone: {error.detail}",
                        metadata={"worker_id": worker_id, "incarnation": incarnation},
                    ) from error
            except RegistryUnavailable:
                if deadline.expired:
                    raise
            await asyncio.sleep(min(BACKOFF_MIN_S, deadline.remaining_s()))

    async def close(self) -> None:
        """Gives up what is being asked for."""
        await end_task(self._fetching_ahead)
        for fetch in tuple(self._fetches.values()):
            await end_task(fetch)
        await self._link.close()

    async def _fetch_ahead(self) -> None:
        while self._ahead:
            key = next(iter(self._ahead))
            tries = self._ahead.pop(key)
            try:
                await self._fetch(key, Deadline.after(_CALL_TIMEOUT_S))
                _log.debug("the KV memory of %s@%s is known before it is needed", *key)
            except NotFound:
                # A worker publishes its memory a moment after it has joined.
                if tries > 1:
                    self._ahead.setdefault(key, tries - 1)
                    await asyncio.sleep(BACKOFF_MIN_S)
            except (HeadraceError, TimeoutError) as error:
                # It is asked for again when it is needed.
                _log.debug("no descriptor of %s@%s yet: %r", *key, error)

    async def _fetch(self, key: tuple[str, str], deadline: Deadline) -> layout_pb2.KvDescriptor:
        """One question at a time for each incarnation, whoever waits for it."""
        fetch = self._fetches.get(key)
        if fetch is None:
            fetch = asyncio.create_task(self._ask(key))
            self._fetches[key] = fetch
            fetch.add_done_callback(lambda _: self._fetches.pop(key))
        with self._link.errors():
            async with asyncio.timeout(deadline.remaining_s()):
                await asyncio.wait([fetch])
            return fetch.result()

    async def _ask(self, key: tuple[str, str]) -> layout_pb2.KvDescriptor:
        reference = registry_pb2.MemberRef(worker_id=key[0], incarnation=key[1])
        request = registry_pb2.GetKvDescriptorRequest(member=reference)
        with self._link.errors():
            response = await self._link.stub.GetKvDescriptor(request, timeout=_CALL_TIMEOUT_S)
        self._known[key] = response.descriptor
        if len(self._known) > _DESCRIPTORS_MAX:
            self._known.popitem(last=False)
        return response.descriptor
