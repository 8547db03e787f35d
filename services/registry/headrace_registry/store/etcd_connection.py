"""Calls to etcd in a bounded set of threads, with a deadline on every call, and a watch.

protobuf 4 and later reject the generated modules of `etcd3`. The descriptors inside them are valid, so this
module reads them from the source without running it. Modules built from them replace the generated
ones.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import importlib.util
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

import grpc
from google.protobuf import descriptor_pool, message_factory

from headrace_common.errors import ConfigError, RegistryUnavailable
from headrace_common.extras import install_command
from headrace_registry.store.etcd_endpoint import (
    UNREACHABLE_REMEDY,
    EtcdAccess,
    EtcdCallFailed,
    EtcdEndpoint,
    cause_of,
)

# In the order of their imports.
_GENERATED = ("kv_pb2", "auth_pb2", "rpc_pb2")


@cache
def load_etcd3() -> Any:
    """The `etcd3` package, untyped. Raises ImportError when it is missing or not as expected."""
    specification = importlib.util.find_spec("etcd3")
    if specification is None or specification.origin is None:
        raise ImportError(
            f"the etcd store needs the extra etcd: {install_command('etcd')}", name="etcd3"
        )
    folder = Path(specification.origin).parent / "etcdrpc"
    # Not the default pool: another package may have registered files named rpc.proto or kv.proto.
    pool = descriptor_pool.DescriptorPool()
    for name in _GENERATED:
        file = pool.AddSerializedFile(_serialized_descriptor(folder / f"{name}.py"))
        qualified_name = f"etcd3.etcdrpc.{name}"
        sys.modules[qualified_name] = _module_of(qualified_name, file)
    return importlib.import_module("etcd3")


def _serialized_descriptor(path: Path) -> bytes:
    """The serialized FileDescriptorProto inside a generated module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            # Code for Python 2 and 3 wraps the text as _b('...').
            literal = node.value.args[0] if isinstance(node.value, ast.Call) else node.value
            value = ast.literal_eval(literal)
            return value if isinstance(value, bytes) else str(value).encode("latin-1")
    raise ImportError(f"{path} holds no serialized descriptor", path=str(path))


def _module_of(qualified_name: str, file: Any) -> ModuleType:
    module = ModuleType(qualified_name)
    module.__dict__["DESCRIPTOR"] = file
    for name, descriptor in file.message_types_by_name.items():
        module.__dict__[name] = message_factory.GetMessageClass(descriptor)
    for enumeration in file.enum_types_by_name.values():
        for value in enumeration.values:
            module.__dict__[value.name] = value.number
    return module


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


_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_THREADS: Final = 8
_CALLS_MAX: Final = 256


class EtcdConnection:
    """The endpoints of one etcd. One event loop uses `call` and `watch`.

    All calls go to one endpoint until it fails. Then they go to the next one, and its watch ends.
    """

    def __init__(self, access: EtcdAccess) -> None:
        """Raises ConfigError when etcd3 is missing or a file cannot be read."""
        self.name = ",".join(f"{host}:{port}" for host, port in access.endpoints)
        self._timeout_s = access.timeout_s
        try:
            etcd3 = load_etcd3()
        except ImportError as error:
            raise ConfigError(f"store: {error}", metadata=self._metadata) from error
        self._endpoints = tuple(
            EtcdEndpoint(etcd3, access, host, port) for host, port in access.endpoints
        )
        self._lock = threading.Lock()
        self._active = 0
        self._serving: EtcdEndpoint | None = None
        self._watch: EtcdWatch | None = None
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="etcd")
        self._call_count = 0

    @property
    def endpoint(self) -> EtcdEndpoint:
        """The endpoint that the next call goes to."""
        return self._endpoints[self._active]

    async def call(self, function: Callable[[Any], _T], *, repeatable: bool = True) -> _T:
        """Runs a blocking function with an etcd3 client in a thread.

        When an endpoint fails, a `repeatable` function runs again at the next one. Raises RegistryUnavailable when etcd
        fails or does not respond in time.
        """
        if self._call_count >= _CALLS_MAX:
            raise self._unavailable(f"{self._call_count} calls are waiting")
        self._call_count += 1
        future = asyncio.get_running_loop().run_in_executor(
            self._executor, self._run, function, repeatable
        )
        future.add_done_callback(self._on_done)
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                return await future
        except TimeoutError:
            raise self._unavailable("no response in time") from None

    def watch(self, prefix: str, start_revision: int) -> EtcdWatch:
        """Watches a prefix from a revision on. The caller closes the watch."""
        self._watch = EtcdWatch(self.endpoint, prefix, start_revision)
        return self._watch

    def close(self) -> None:
        """Closes the connections; calls in progress fail."""
        for endpoint in self._endpoints:
            endpoint.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, function: Callable[[Any], _T], repeatable: bool) -> _T:
        deadline_s = time.monotonic() + 2 * self._timeout_s
        tries = 0
        while True:
            tries += 1
            endpoint = self.endpoint
            try:
                result = endpoint.run(function)
            except EtcdCallFailed as error:
                if not error.refused:
                    self._leave(endpoint, error.cause)
                others = tries < len(self._endpoints) and time.monotonic() < deadline_s
                if error.refused or not repeatable or not others:
                    cause = f"{endpoint.name}: {error.cause}"
                    raise self._unavailable(cause, error.remedy) from error
            else:
                self._record_success(endpoint)
                return result

    def _leave(self, failed: EtcdEndpoint, cause: str) -> None:
        with self._lock:
            if len(self._endpoints) == 1 or self.endpoint is not failed:
                return
            self._active = (self._active + 1) % len(self._endpoints)
        watch = self._watch
        if watch is not None and watch.endpoint is failed:
            watch.end(f"etcd at {failed.name} fails ({cause})")

    def _record_success(self, endpoint: EtcdEndpoint) -> None:
        with self._lock:
            before = self._serving
            if endpoint is not self.endpoint or endpoint is before:
                return
            self._serving = endpoint
        if before is not None:
            _log.warning(
                "etcd at %s serves in place of %s, which failed", endpoint.name, before.name
            )

    def _on_done(self, future: asyncio.Future[Any]) -> None:
        self._call_count -= 1
        # The caller may be cancelled. Reading the exception marks it as handled.
        if not future.cancelled():
            future.exception()

    @property
    def _metadata(self) -> dict[str, str]:
        return {"store": f"etcd://{self.name}"}

    def _unavailable(self, cause: str, remedy: str = UNREACHABLE_REMEDY) -> RegistryUnavailable:
        return RegistryUnavailable(
            f"etcd at {self.name} does not serve ({cause}): {remedy}",
            metadata={**self._metadata, "cause": cause},
        )
