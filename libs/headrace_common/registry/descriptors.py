"""A cache of the KV descriptors of other workers.

An incarnation's descriptor never changes, so each is requested once. A prefetched descriptor stays
available during an outage of the registry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import Final, TypeAlias

import grpc.aio

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    HeadraceError,
    NotFound,
    RegistryUnavailable,
    StaleIncarnation,
)
from headrace_common.registry.link import BACKOFF_MIN_S, CALL_TIMEOUT_S, RegistryLink
from headrace_common.tasks import Recent, end_task

_log = logging.getLogger(__name__)

_DESCRIPTORS_MAX: Final = 1024
# A worker publishes its descriptor a moment after it has registered.
_PUBLISH_DELAY_MAX_S: Final = 0.5
_PREFETCH_ATTEMPTS: Final = 50

_Key: TypeAlias = tuple[str, str]
"""Worker id and incarnation."""


class DescriptorCache:
    """The descriptors used last, by worker incarnation."""

    def __init__(self, registry: grpc.aio.Channel) -> None:
        self._link = RegistryLink(registry, "KV descriptors")
        self._descriptors: Recent[_Key, layout_pb2.KvDescriptor] = Recent(_DESCRIPTORS_MAX)
        self._fetches: dict[_Key, asyncio.Task[layout_pb2.KvDescriptor]] = {}
        # Attempts left for each incarnation to be prefetched, in order.
        self._prefetch_attempts: dict[_Key, int] = {}
        self._prefetcher: asyncio.Task[None] | None = None

    def prefetch(self, members: Iterable[tuple[str, str]]) -> None:
        """Starts to fetch the descriptors of these (worker id, incarnation), one after the other.

        They replace the members of an earlier call that are not fetched yet.
        """
        self._prefetch_attempts = {
            key: _PREFETCH_ATTEMPTS for key in members if key not in self._descriptors
        }
        if self._prefetch_attempts and (self._prefetcher is None or self._prefetcher.done()):
            self._prefetcher = asyncio.create_task(self._run_prefetch())

    async def get(
        self, worker_id: str, incarnation: str, deadline: Deadline
    ) -> layout_pb2.KvDescriptor:
        """The descriptor of one incarnation.

        Raises StaleIncarnation when the registry does not have it, RegistryUnavailable when the
        registry cannot be reached before the deadline.
        """
        key = (worker_id, incarnation)
        published = Deadline.after(_PUBLISH_DELAY_MAX_S)
        while True:
            known = self._descriptors.get(key)
            if known is not None:
                self._descriptors.move_to_end(key)
                return known
            try:
                return await self._fetch(key, deadline)
            except NotFound as error:
                if published.expired or deadline.expired:
                    raise StaleIncarnation(
                        f"{worker_id}@{incarnation} is gone: {error.detail}",
                        metadata={"worker_id": worker_id, "incarnation": incarnation},
                    ) from error
            except RegistryUnavailable:
                if deadline.expired:
                    raise
            await asyncio.sleep(min(BACKOFF_MIN_S, deadline.remaining_s()))

    async def close(self) -> None:
        """Cancels all fetches."""
        await end_task(self._prefetcher)
        for fetch in tuple(self._fetches.values()):
            await end_task(fetch)

    async def _run_prefetch(self) -> None:
        while self._prefetch_attempts:
            key = next(iter(self._prefetch_attempts))
            attempts = self._prefetch_attempts.pop(key)
            try:
                await self._fetch(key, Deadline.after(CALL_TIMEOUT_S))
                _log.debug("prefetched the KV descriptor of %s@%s", *key)
            except NotFound:
                # The worker may not have published it yet.
                if attempts > 1:
                    self._prefetch_attempts.setdefault(key, attempts - 1)
                    await asyncio.sleep(BACKOFF_MIN_S)
            except (HeadraceError, TimeoutError) as error:
                # `get` requests it again.
                _log.debug("cannot prefetch the KV descriptor of %s@%s: %r", *key, error)

    async def _fetch(self, key: _Key, deadline: Deadline) -> layout_pb2.KvDescriptor:
        """Waits for one request per incarnation, which all callers share."""
        fetch = self._fetches.get(key)
        if fetch is None:
            fetch = asyncio.create_task(self._request(key))
            self._fetches[key] = fetch
            fetch.add_done_callback(partial(self._forget_fetch, key))
        with self._link.converted_errors():
            async with asyncio.timeout(deadline.remaining_s()):
                await asyncio.wait([fetch])
            return fetch.result()

    def _forget_fetch(self, key: _Key, fetch: asyncio.Task[layout_pb2.KvDescriptor]) -> None:
        del self._fetches[key]
        # Every caller may have reached its deadline. asyncio logs an exception that is never read.
        if not fetch.cancelled():
            fetch.exception()

    async def _request(self, key: _Key) -> layout_pb2.KvDescriptor:
        worker_id, incarnation = key
        reference = registry_pb2.MemberRef(worker_id=worker_id, incarnation=incarnation)
        request = registry_pb2.GetKvDescriptorRequest(member=reference)
        with self._link.converted_errors():
            response = await self._link.stub.GetKvDescriptor(request, timeout=CALL_TIMEOUT_S)
        self._descriptors[key] = response.descriptor
        return response.descriptor
