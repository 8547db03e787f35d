"""Reflection of a listener's RPCs. It names no RPC that the listener does not serve.

Both versions of its protocol are served. The package grpcio-reflection has v1alpha alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection, reflection_pb2

from headrace_common.access.table import Listener, is_served

_METHOD: Final = "ServerReflectionInfo"
REFLECTION_NAMES: Final = (reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection")
"""The names of the services."""


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


def enable_reflection(
    server: grpc.aio.Server, names: Sequence[str], pool: descriptor_pool.DescriptorPool
) -> None:
    """Serves the descriptions in `pool` of the services with these names."""
    servicer = reflection.aio.ReflectionServicer(names, pool=pool)
    # The messages of both versions are the same.
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(name, {_METHOD: handler})
            for name in REFLECTION_NAMES
        ]
    )


def _describe_stable() -> None:
    """Adds the file of v1 to the default pool: that of v1alpha with its own names."""
    content = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(content)
    text = text_format.MessageToString(content)
    stable = text_format.Parse(text.replace("v1alpha", "v1"), descriptor_pb2.FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(stable.SerializeToString())


_describe_stable()
