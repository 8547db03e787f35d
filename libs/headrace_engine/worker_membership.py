"""A worker's place in the registry, and the routers that it learns of there."""

from __future__ import annotations

from collections.abc import Callable

from headrace.registry.v1 import registry_pb2
from headrace_common.channel import open_channel
from headrace_common.registry_client import DescriptorCache, Membership, RegistryView
from headrace_common.telemetry import Telemetry
from headrace_engine.worker_config import WorkerConfig
from headrace_kv.layout import KvDescriptor, descriptor_to_proto

RouterListener = Callable[[list[registry_pb2.Member]], None]


class WorkerMembership:
    """Announces the worker, ships its spans to every live router, and tells `on_routers` which
    those are.
    """

    def __init__(
        self,
        config: WorkerConfig,
        member: registry_pb2.Member,
        descriptor: KvDescriptor | None,
        telemetry: Telemetry,
        on_routers: RouterListener | None = None,
    ) -> None:
        self._config = config
        self._telemetry = telemetry
        self._on_routers = on_routers
        self._channel = open_channel(config.registry, config)
        self.descriptors = DescriptorCache(self._channel)
        self._membership = Membership(
            self._channel,
            member,
            ttl_s=config.member_ttl_s,
            descriptor=None if descriptor is None else descriptor_to_proto(descriptor),
        )
        self._view = RegistryView(self._channel, on_change=self._note_change)

    async def join(self) -> None:
        """Registers, and learns who is there. Raises RegistryUnavailable."""
        await self._membership.start(self._config.registration_timeout_s)
        await self._view.start(self._config.registration_timeout_s)

    async def leave(self) -> None:
        """Strikes the worker from the registry; routers stop choosing it."""
        await self._membership.stop()

    async def close(self) -> None:
        """Ends everything. Leaves too, when that was not done."""
        await self._membership.stop()
        await self._view.stop()
        await self.descriptors.close()
        await self._channel.close()

    def _note_change(self, view: RegistryView) -> None:
        routers = view.of_role(registry_pb2.Member.ROLE_ROUTER)
        self._telemetry.set_collectors([router.endpoint for router in routers])
        if self._on_routers is not None:
            self._on_routers(list(routers))
