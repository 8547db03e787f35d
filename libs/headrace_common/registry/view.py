"""A view of the members and the policy, kept current by a watch of the registry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType

import grpc.aio

from headrace.registry.v1 import registry_pb2
from headrace_common.errors import (
    HeadraceError,
    WatchExpired,
)
from headrace_common.registry.link import CALL_TIMEOUT_S, RegistryLink, end_task, run_forever
from headrace_common.registry.policy import default_policy


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
        self._policy = default_policy()
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
                async with asyncio.timeout(CALL_TIMEOUT_S):
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
