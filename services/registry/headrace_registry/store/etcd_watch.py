"""A watch of a prefix in etcd."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import grpc

from headrace_common.errors import RegistryUnavailable
from headrace_registry.store.etcd_endpoint import EtcdEndpoint, cause_of

_WATCH_BUFFER: Final = 64
# A member of the cluster that has lost its leader ends the watch. Otherwise it would be silent.
_REQUIRE_LEADER: Final = ("hasleader", "true")


class EtcdWatch:
    """A watch of a prefix at one endpoint, received by a thread and read on the event loop.

    Replaces etcd3's watcher, which cannot be stopped and loops without a pause during an outage.
    """

    def __init__(self, endpoint: EtcdEndpoint, prefix: str, start_revision: int) -> None:
        self.endpoint = endpoint
        messages = endpoint.messages
        create = messages.WatchCreateRequest(
            key=prefix.encode(),
            range_end=_prefix_end(prefix.encode()),
            start_revision=start_revision,
        )
        self._request = messages.WatchRequest(create_request=create)
        self._closed = threading.Event()
        self._room = threading.BoundedSemaphore(_WATCH_BUFFER)
        self._loop = asyncio.get_running_loop()
        self._responses: asyncio.Queue[Any] = asyncio.Queue()
        self._call = messages.WatchStub(endpoint.client.channel).Watch(
            self._requests(), metadata=(_REQUIRE_LEADER, *endpoint.token_metadata)
        )
        self._thread = threading.Thread(target=self._read, name="etcd-watch", daemon=True)
        self._thread.start()

    async def responses(self, start_timeout_s: float) -> AsyncIterator[Any]:
        """Yields etcd's WatchResponses. The first confirms the watch, within the timeout.

        Raises RegistryUnavailable when etcd ends the watch.
        """
        try:
            async with asyncio.timeout(start_timeout_s):
                first = await self._next()
        except TimeoutError:
            raise RegistryUnavailable("etcd does not confirm a watch in time") from None
        yield first
        while True:
            yield await self._next()

    def end(self, why: str) -> None:
        """Ends the watch with RegistryUnavailable. Any thread may call it."""
        self._deliver(RegistryUnavailable(why))
        self.close()

    def close(self) -> None:
        """Ends the watch and its thread. Does not wait."""
        self._closed.set()
        self._call.cancel()

    async def _next(self) -> Any:
        response = await self._responses.get()
        if isinstance(response, RegistryUnavailable):
            raise response
        self._room.release()
        return response

    def _requests(self) -> Iterator[Any]:
        yield self._request
        self._closed.wait()

    def _read(self) -> None:
        try:
            for response in self._call:
                # The event loop is behind. Flow control keeps the rest in etcd.
                while not self._room.acquire(timeout=0.5):
                    if self._closed.is_set():
                        return
                self._deliver(response)
            self._deliver(RegistryUnavailable("etcd ended the watch"))
        except grpc.RpcError as error:
            self._deliver(RegistryUnavailable(f"the watch of etcd broke ({cause_of(error)})"))
        finally:
            self._closed.set()

    def _deliver(self, response: Any) -> None:
        if self._closed.is_set():
            return
        # The event loop may be closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._responses.put_nowait, response)


def _prefix_end(prefix: bytes) -> bytes:
    """The first key after all keys with the prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
