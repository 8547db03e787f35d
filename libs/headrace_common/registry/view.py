"""A local copy of the members and the policy, kept current by a watch of the registry, and the policy before that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Final

import grpc.aio

from headrace.registry.v1 import registry_pb2
from headrace_common.errors import HeadraceError, WatchExpired
from headrace_common.registry.duties import all_members
from headrace_common.registry.link import CALL_TIMEOUT_S, RegistryLink
from headrace_common.tasks import end_task, run_forever

DEFAULT_RETRY_BUDGET: Final = 2


def default_policy() -> registry_pb2.Policy:
    """A new message; the caller may change it."""
    return registry_pb2.Policy(retry_budget=DEFAULT_RETRY_BUDGET)


# Reading the members takes a time that grows with their number.
_NOTIFICATION_INTERVAL_S: Final = 0.05


class RegistryView:
    """The members and the policy in force, as of the registry's last message.

    During an outage of the registry the view does not change. A registry may return without its
    records. Members that it does not list then stay in the view for `grace_s`, in which they register
    again. The event loop calls `on_change` soon after each change of members, policy or connection, and at most every
    50 ms.
    """

    def __init__(
        self,
        registry: grpc.aio.Channel,
        on_change: Callable[[RegistryView], None] | None = None,
        grace_s: float = 10.0,
        *,
        roles: Collection[registry_pb2.Member.Role.ValueType] = (),
        without_layouts: bool = False,
    ) -> None:
        """`roles`: only their members are followed, none means all. `without_layouts`: members have no layout."""
        self._roles = tuple(roles)
        self._without_layouts = without_layouts
        self._link = RegistryLink(registry, "registry view")
        self._on_change = on_change
        self._grace_s = grace_s
        self._members: Mapping[str, registry_pb2.Member] = {}
        self.policy = default_policy()
        self._revision = 0
        self.connected = False
        """Whether the watch stands, so that changes arrive."""
        self._received = asyncio.Event()
        # Members that the last snapshot lacked.
        self._vanished: set[str] = set()
        self._grace_timer: asyncio.TimerHandle | None = None
        self._follower: asyncio.Task[None] | None = None
        self._last_error: HeadraceError | None = None
        self._notification: asyncio.TimerHandle | None = None
        self._next_notification_s = 0.0

    @property
    def members(self) -> Mapping[str, registry_pb2.Member]:
        """Members by worker id. The mapping never changes: a later view is another mapping."""
        return MappingProxyType(self._members)

    def of_role(
        self, *roles: registry_pb2.Member.Role.ValueType
    ) -> tuple[registry_pb2.Member, ...]:
        """Members with one of these roles, by worker id."""
        return tuple(member for _, member in sorted(self._members.items()) if member.role in roles)

    async def start(self, timeout_s: float = 15.0) -> None:
        """Waits for the first snapshot. Raises RegistryUnavailable when none arrives in time."""
        self._follower = run_forever(self._follow, "registry-view")
        try:
            async with asyncio.timeout(timeout_s):
                await self._received.wait()
        except TimeoutError:
            await self.stop()
            raise self._last_error or self._link.unavailable("no snapshot in time") from None

    async def list_now(self) -> Collection[registry_pb2.Member]:
        """All members that the registry has at this moment. Raises RegistryUnavailable."""
        with self._link.converted_errors():
            return await all_members(self._link.stub, CALL_TIMEOUT_S)

    async def stop(self) -> None:
        """Stops the watch. The last view stays readable."""
        await end_task(self._follower)
        self._follower = None
        self.connected = False
        for timer in (self._grace_timer, self._notification):
            if timer is not None:
                timer.cancel()

    async def _follow(self) -> None:
        while True:
            try:
                await self._watch()
            except HeadraceError as error:
                self._last_error = error
                if isinstance(error, WatchExpired):
                    self._revision = 0
                if self.connected:
                    self.connected = False
                    self._notify()
                await self._link.back_off(error)

    async def _watch(self) -> None:
        """Applies responses until the watch ends, which raises the error."""
        request = registry_pb2.WatchRequest(
            start_revision=self._revision,
            roles=self._roles,
            without_layouts=self._without_layouts,
        )
        call = self._link.stub.Watch(request)
        try:
            with self._link.converted_errors():
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    response = await call.read()
            while isinstance(response, registry_pb2.WatchResponse):
                self._apply(response)
                with self._link.converted_errors():
                    response = await call.read()
        finally:
            call.cancel()
        raise self._link.unavailable("the registry ended the watch")

    def _apply(self, response: registry_pb2.WatchResponse) -> None:
        members = dict(self._members)
        if response.HasField("snapshot"):
            listed = {member.worker_id: member for member in response.snapshot.members}
            self._vanished = set(members) - set(listed)
            members.update(listed)
            self.policy = response.snapshot.policy
        for change in response.changes:
            self._apply_change(members, change)
        self._members = members
        self._revision = response.revision
        was_disconnected = not self.connected
        if was_disconnected:
            self.connected = True
            self._link.record_success()
            self._start_grace()
        if was_disconnected or response.changes:
            self._notify()
        self._received.set()

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
            self.policy = change.policy_put

    def _start_grace(self) -> None:
        if self._grace_timer is not None:
            self._grace_timer.cancel()
            self._grace_timer = None
        if self._vanished:
            loop = asyncio.get_running_loop()
            self._grace_timer = loop.call_later(self._grace_s, self._drop_vanished)

    def _drop_vanished(self) -> None:
        self._grace_timer = None
        # During an outage members cannot register again, so they keep their grace.
        if self.connected:
            self._members = {
                worker_id: member
                for worker_id, member in self._members.items()
                if worker_id not in self._vanished
            }
            self._vanished = set()
            self._notify()

    def _notify(self) -> None:
        if self._on_change is not None and self._notification is None:
            loop = asyncio.get_running_loop()
            self._notification = loop.call_at(self._next_notification_s, self._call_on_change)

    def _call_on_change(self) -> None:
        self._notification = None
        self._next_notification_s = asyncio.get_running_loop().time() + _NOTIFICATION_INTERVAL_S
        if self._on_change is not None:
            # The event loop logs an exception of the callback, and the watch continues.
            self._on_change(self)
