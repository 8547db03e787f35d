"""A worker's registration, and the routers that the registry lists."""

from __future__ import annotations

from headrace.registry.v1 import registry_pb2
from headrace_common.registry.membership import Membership
from headrace_engine.prefix.event_publisher import PrefixEventPublisher
from headrace_engine.worker.config import WorkerConfig
from headrace_engine.worker.host import RouterListener, WorkerHost
from headrace_kv.layout.layout import KvDescriptor
from headrace_kv.layout.proto import descriptor_to_proto


class WorkerMembership:
    """Registers the worker and calls `on_routers` with the live routers.

    `prefix_events` gets the hash key that the registry gives.
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
            renewals=host.renewals,
        )

    @property
    def prefix_hash_key(self) -> int:
        """The deployment's key for hashes of prompt prefixes. 0 before `join` has returned."""
        return self._membership.prefix_hash_key

    async def join(self) -> None:
        """Registers the worker and waits for the list of routers. Raises RegistryUnavailable."""
        await self._membership.start(self._timeout_s)
        if self._prefix_events is not None:
            self._prefix_events.set_hash_key(self._membership.prefix_hash_key, self._model)
        await self._host.follow_routers(self._on_routers)

    async def leave(self) -> None:
        """Removes the worker from the registry, so that routers stop choosing it. Idempotent."""
        self._host.unfollow_routers(self._on_routers)
        await self._membership.stop()
