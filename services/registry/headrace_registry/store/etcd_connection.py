"""Calls to etcd in a bounded set of threads, with a deadline on every call, and a watch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import grpc

from headrace_common.errors import ConfigError, RegistryUnavailable
from headrace_registry.store.etcd3_compat import load_etcd3

_T = TypeVar("_T")

_THREADS: Final = 8
_CALLS_MAX: Final = 256
_WATCH_BUFFER: Final = 64
# Pings detect a dead connection. etcd rejects more than one in 5 s.
_CHANNEL_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)


class EtcdConnection:
    """One etcd endpoint. One event loop uses `call` and `watch`."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self.endpoint = f"{host}:{port}"
        self._timeout_s = timeout_s
        try:
            self._etcd3 = load_etcd3()
        except ImportError as error:
            raise ConfigError(
                f"store: {error}", metadata={"store": f"etcd://{self.endpoint}"}
            ) from error
        self.client: Any = self._etcd3.client(
            host=host, port=port, timeout=timeout_s, grpc_options=_CHANNEL_OPTIONS
        )
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="etcd")
        self._call_count = 0

    async def call(self, function: Callable[[], _T]) -> _T:
        """Runs a blocking function that uses `client` in a thread.

        Raises RegistryUnavailable when etcd fails or does not respond in time.
        """
        if self._call_count >= _CALLS_MAX:
            raise self._unavailable(f"{self._call_count} calls are waiting")
        self._call_count += 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._run, function)
        future.add_done_callback(self._on_done)
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                return await future
        except TimeoutError:
            raise self._unavailable("no response in time") from None

    def watch(self, prefix: str, start_revision: int) -> EtcdWatch:
        """Watches a prefix from a revision on. The caller closes the watch."""
        return EtcdWatch(self._etcd3.etcdrpc, self.client.channel, prefix, start_revision)

    def close(self) -> None:
        """Closes the connection; calls in progress fail."""
        self.client.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, function: Callable[[], _T]) -> _T:
        try:
            return function()
        except (self._etcd3.Etcd3Exception, grpc.RpcError) as error:
            raise self._unavailable(_cause(error)) from error

    def _on_done(self, future: asyncio.Future[Any]) -> None:
        self._call_count -= 1
        # The caller may be cancelled. Reading the exception marks it as handled.
        if not future.cancelled():
            future.exception()

    def _unavailable(self, cause: str) -> RegistryUnavailable:
        return RegistryUnavailable(
            f"etcd at {self.endpoint} does not serve ({cause}): "
            "is it running and does it have a leader?",
            metadata={"store": f"etcd://{self.endpoint}", "cause": cause},
        )


class EtcdWatch:
    """A watch of a prefix, received by a thread and read on the event loop.

    Replaces etcd3's watcher, which cannot be stopped and loops without a pause during an outage.
    """

    def __init__(
        self, messages: Any, channel: grpc.Channel, prefix: str, start_revision: int
    ) -> None:
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
        self._call = messages.WatchStub(channel).Watch(self._requests())
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
            self._deliver(RegistryUnavailable(f"the watch of etcd broke ({_cause(error)})"))
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


def _cause(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
