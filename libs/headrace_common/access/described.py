"""The description of a listener's RPCs, for reflection. It names no RPC that the listener does not serve."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor

from headrace_common.access.table import Listener, is_served


def descriptors_of(listener: Listener, services: Iterable[str]) -> descriptor_pool.DescriptorPool:
    """A pool with these services, less the methods that belong to another listener. Do not add to it."""
    return _described(listener, tuple(services))


# The workers of one process serve the same.
@lru_cache(maxsize=16)
def _described(listener: Listener, services: tuple[str, ...]) -> descriptor_pool.DescriptorPool:
    described = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name in added:
            return
        added.add(file.name)
        for dependency in file.dependencies:
            add(dependency)
        content = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(content)
        for service in content.service:
            full_name = f"{content.package}.{service.name}"
            kept = [
                method
                for method in service.method
                if is_served(f"/{full_name}/{method.name}", listener)
            ]
            service.ClearField("method")
            service.method.extend(kept)
        described.Add(content)

    for name in services:
        add(descriptor_pool.Default().FindFileContainingSymbol(name))
    return described
