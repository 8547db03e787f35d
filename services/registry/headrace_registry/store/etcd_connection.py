"""Calls to etcd with a deadline on every call, and a watch. Calls and watch go to one endpoint until it fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc.aio

from headrace.etcd.v3 import etcd_pb2
from headrace_common.errors import RegistryUnavailable
from headrace_registry.store.etcd_endpoint import (
    UNREACHABLE_REMEDY,
    EtcdAccess,
    EtcdCallFailed,
    EtcdEndpoint,
    cause_of,
)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# A member of the cluster that has lost its leader ends the watch. Otherwise it would be silent.
_REQUIRE_LEADER: Final = ("hasleader", "true")


class EtcdConnection:
    """The endpoints of one etcd. One event loop uses it.

    All calls go to one endpoint until it fails. Then they go to the next one, and its watch ends.
    """

    def __init__(self, access: EtcdAccess) -> None:
        """Raises ConfigError when a file cannot be read."""
        self.name = ",".join(f"{host}:{port}" for host, port in access.endpoints)
        self._timeout_s = access.timeout_s
        self._endpoints = tuple(EtcdEndpoint(access, host, port) for host, port in access.endpoints)
        self._active = 0
        self._serving: EtcdEndpoint | None = None
        self._watch: Any = None

    @property
    def endpoint(self) -> EtcdEndpoint:
        """The endpoint that the next call goes to."""
        return self._endpoints[self._active]

    async def call(
        self, function: Callable[[EtcdEndpoint], Awaitable[_T]], *, repeatable: bool = True
    ) -> _T:
        """What a function returns that calls an endpoint.

        When an endpoint fails, a `repeatable` function runs again at the next one. Raises RegistryUnavailable when etcd
        fails or does not respond in time.
        """
        tries = len(self._endpoints) if repeatable else 1
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                while True:
                    tries -= 1
                    endpoint = self.endpoint
                    try:
                        result = await endpoint.run(function)
                    except EtcdCallFailed as error:
                        if not error.refused:
                            self._leave(endpoint, error.cause)
                        if error.refused or not tries:
                            cause = f"{endpoint.name}: {error.cause}"
                            raise self._unavailable(cause, error.remedy) from error
                    else:
                        self._record_success(endpoint)
                        return result
        except TimeoutError:
            raise self._unavailable("no response in time") from None

    async def watch(
        self, prefix: str, start_revision: int
    ) -> AsyncGenerator[etcd_pb2.WatchResponse]:
        """The changes of a prefix from a revision on. The first response confirms the watch, in time.

        Raises RegistryUnavailable when etcd ends the watch, or when its endpoint fails.
        """
        create = etcd_pb2.WatchCreateRequest(
            key=prefix.encode(), range_end=prefix_end(prefix), start_revision=start_revision
        )
        endpoint = self.endpoint
        call = self._watch = endpoint.stream(
            "Watch/Watch", etcd_pb2.WatchRequest, etcd_pb2.WatchResponse, _REQUIRE_LEADER
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                await call.write(etcd_pb2.WatchRequest(create_request=create))
                response = await call.read()
            while isinstance(response, etcd_pb2.WatchResponse):
                yield response
                response = await call.read()
            raise RegistryUnavailable("etcd ended the watch")
        except TimeoutError:
            raise RegistryUnavailable("etcd does not confirm a watch in time") from None
        except grpc.aio.AioRpcError as error:
            raise RegistryUnavailable(f"the watch of etcd broke ({cause_of(error)})") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise RegistryUnavailable(f"etcd at {endpoint.name} fails") from None
        finally:
            call.cancel()

    async def close(self) -> None:
        """Closes the connections; calls in progress fail."""
        for endpoint in self._endpoints:
            await endpoint.close()

    def _leave(self, failed: EtcdEndpoint, cause: str) -> None:
        if len(self._endpoints) == 1 or self.endpoint is not failed:
            return
        _log.debug("etcd at %s fails (%s)", failed.name, cause)
        self._active = (self._active + 1) % len(self._endpoints)
        if self._watch is not None:
            self._watch.cancel()

    def _record_success(self, endpoint: EtcdEndpoint) -> None:
        before = self._serving
        if endpoint is not self.endpoint or endpoint is before:
            return
        self._serving = endpoint
        if before is not None:
            _log.warning(
                "etcd at %s serves in place of %s, which failed", endpoint.name, before.name
            )

    def _unavailable(self, cause: str, remedy: str = UNREACHABLE_REMEDY) -> RegistryUnavailable:
        return RegistryUnavailable(
            f"etcd at {self.name} does not serve ({cause}): {remedy}",
            metadata={"store": f"etcd://{self.name}", "cause": cause},
        )


def prefix_end(prefix: str) -> bytes:
    """The first key after all keys with the prefix."""
    key = prefix.encode()
    return key[:-1] + bytes([key[-1] + 1])
