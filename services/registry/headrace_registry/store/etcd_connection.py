"""Calls to etcd in a bounded set of threads, with a deadline on every call, and a watch."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from headrace_common.errors import ConfigError, RegistryUnavailable
from headrace_registry.store.etcd3_compat import load_etcd3
from headrace_registry.store.etcd_endpoint import EtcdAccess, EtcdCallFailed, EtcdEndpoint
from headrace_registry.store.etcd_watch import EtcdWatch

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
                    raise self._unavailable(cause, error.refused) from error
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

    def _unavailable(self, cause: str, refused: bool = False) -> RegistryUnavailable:
        remedy = (
            "check its user, its password file and the user's permissions."
            if refused
            else "is it running and does it have a leader?"
        )
        return RegistryUnavailable(
            f"etcd at {self.name} does not serve ({cause}): {remedy}",
            metadata={**self._metadata, "cause": cause},
        )
