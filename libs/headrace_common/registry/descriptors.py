"""A cache of the KV descriptors of other workers."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

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
from headrace_common.registry.link import BACKOFF_MIN_S, CALL_TIMEOUT_S, RegistryLink, end_task

_log = logging.getLogger(__name__)

_DESCRIPTORS_MAX: Final = 1024


# A worker is seen a moment before its descriptor is.
_DESCRIPTOR_SETTLE_S: Final = 0.5


# How often a descriptor is asked for that nobody needs yet.
_AHEAD_TRIES: Final = 50


class DescriptorCache:
    """KV memory of worker incarnations. Asked for once each: an incarnation's never changes."""

    def __init__(self, registry: str | grpc.aio.Channel) -> None:
        self._link = RegistryLink(registry, "KV descriptors")
        self._known: OrderedDict[tuple[str, str], layout_pb2.KvDescriptor] = OrderedDict()
        self._fetches: dict[tuple[str, str], asyncio.Task[layout_pb2.KvDescriptor]] = {}
        self._ahead: dict[tuple[str, str], int] = {}
        self._fetching_ahead: asyncio.Task[None] | None = None

    def prefetch(self, members: Iterable[tuple[str, str]]) -> None:
        """Asks for these (worker id, incarnation) before anybody needs them, one after the other.

        So workers that have never met can meet while the registry is away.
        """
        self._ahead = {key: _AHEAD_TRIES for key in members if key not in self._known}
        if self._ahead and (self._fetching_ahead is None or self._fetching_ahead.done()):
            self._fetching_ahead = asyncio.create_task(self._fetch_ahead())

    async def get(
        self, worker_id: str, incarnation: str, deadline: Deadline
    ) -> layout_pb2.KvDescriptor:
        """The descriptor of one incarnation.

        Raises StaleIncarnation when the registry does not have it, RegistryUnavailable when the
        registry was away until the deadline.
        """
        key = (worker_id, incarnation)
        settled = Deadline.after(_DESCRIPTOR_SETTLE_S)
        while True:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
            try:
                return await self._fetch(key, deadline)
            except NotFound as error:
                if settled.expired or deadline.expired:
                    raise StaleIncarnation(
                        f"{worker_id}@{incarnation} is gone: {error.detail}",
                        metadata={"worker_id": worker_id, "incarnation": incarnation},
                    ) from error
            except RegistryUnavailable:
                if deadline.expired:
                    raise
            await asyncio.sleep(min(BACKOFF_MIN_S, deadline.remaining_s()))

    async def close(self) -> None:
        """Gives up what is being asked for."""
        await end_task(self._fetching_ahead)
        for fetch in tuple(self._fetches.values()):
            await end_task(fetch)
        await self._link.close()

    async def _fetch_ahead(self) -> None:
        while self._ahead:
            key = next(iter(self._ahead))
            tries = self._ahead.pop(key)
            try:
                await self._fetch(key, Deadline.after(CALL_TIMEOUT_S))
                _log.debug("the KV memory of %s@%s is known before it is needed", *key)
            except NotFound:
                # A worker publishes its memory a moment after it has joined.
                if tries > 1:
                    self._ahead.setdefault(key, tries - 1)
                    await asyncio.sleep(BACKOFF_MIN_S)
            except (HeadraceError, TimeoutError) as error:
                # It is asked for again when it is needed.
                _log.debug("no descriptor of %s@%s yet: %r", *key, error)

    async def _fetch(self, key: tuple[str, str], deadline: Deadline) -> layout_pb2.KvDescriptor:
        """One question at a time for each incarnation, whoever waits for it."""
        fetch = self._fetches.get(key)
        if fetch is None:
            fetch = asyncio.create_task(self._ask(key))
            self._fetches[key] = fetch
            fetch.add_done_callback(lambda _: self._fetches.pop(key))
        with self._link.errors():
            async with asyncio.timeout(deadline.remaining_s()):
                await asyncio.wait([fetch])
            return fetch.result()

    async def _ask(self, key: tuple[str, str]) -> layout_pb2.KvDescriptor:
        reference = registry_pb2.MemberRef(worker_id=key[0], incarnation=key[1])
        request = registry_pb2.GetKvDescriptorRequest(member=reference)
        with self._link.errors():
            response = await self._link.stub.GetKvDescriptor(request, timeout=CALL_TIMEOUT_S)
        self._known[key] = response.descriptor
        if len(self._known) > _DESCRIPTORS_MAX:
            self._known.popitem(last=False)
        return response.descriptor
