"""Looks up the KV memory of decode workers in the registry."""

from __future__ import annotations

from headrace_common.deadlines import Deadline
from headrace_common.errors import InternalError
from headrace_common.registry.descriptors import DescriptorCache
from headrace_kv.layout.layout import KvDescriptor, WorkerRef
from headrace_kv.layout.proto import descriptor_from_proto


class RegistryDescriptors:
    """A DescriptorSource for engines, usable once it is connected.

    An engine is built before any connection is opened, because it may start processes of its own.
    """

    def __init__(self) -> None:
        self._cache: DescriptorCache | None = None

    def connect(self, cache: DescriptorCache) -> None:
        """Takes descriptors from `cache` from now on."""
        self._cache = cache

    async def __call__(self, ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        """Raises StaleIncarnation when that incarnation is gone."""
        if self._cache is None:
            raise InternalError(f"the KV memory of {ref} was needed before the worker joined")
        return descriptor_from_proto(
            await self._cache.get(ref.worker_id, ref.incarnation, deadline)
        )
