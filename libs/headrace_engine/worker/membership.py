"""A worker's place in the registry, and the routers that it learns of there."""

from __future__ import annotations

from headrace.registry.v1 import registry_pb2
from headrace_common.registry.membership import Membership
from headrace_engine.prefix.event_publisher import PrefixEventPublisher
from headrace_engine.worker.config import WorkerConfig
from headrace_engine.worker.host import RouterListener, WorkerHost
from headrace_kv.layout.layout import KvDescriptor
from headrace_kv.layout.proto import descriptor_to_proto


class WorkerMembership:
    """Announces the worker, and tells `on_routers` which routers are live.

    `prefix_events` begins with the key that the registry gives.
    """

    def __init__(
        self,
        config: WorkerConfig,
        host: WorkerHost,
        member: registry_pb2.Member,
        descriptor: KvDescriptor | None,
        on_routers: RouterListener | None = None,
        prefix_events: PrefixEventPublisher | None = None,
    ) -> None:
        self._timeout_s = config.registration_timeout_s
        self._host = host
        self._model = member.model
        self._prefix_events = prefix_events
        self._on_routers = on_routers
        self._membership = Membership(
            host.registry,
            member,
            ttl_s=config.member_ttl_s,
            descriptor=None if descriptor is None else descriptor_to_proto(descriptor),
        )

    @property
    def ticket_key(self) -> bytes:
        """The deployment's key for tickets; no bytes before `join`."""
        return self._membership.ticket_key

    async def join(self) -> None:
        """Registers, and learns who is there. Raises RegistryUnavailable."""
        await self._membership.start(self._timeout_s)
        if self._prefix_events is not None:
            self._prefix_events.begin(self._membership.prefix_hash_key, self._model)
        await self._host.follow_routers(self._on_routers)

    async def leave(self) -> None:
        """Strikes the worker from the registry; routers stop choosing it. Again, it does nothing."""
        self._host.unfollow_routers(self._on_routers)
        await self._membership.stop()
