"""Pulls tasks from every live router."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from typing import TypeAlias

import grpc.aio

from headrace.kv.v1 import layout_pb2
from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace_common.config import ServiceConfig
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import Draining, QueueFull
from headrace_common.registry.adapters import Adapter, adapter_to_proto
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_prefill.pull.session import MAX_INTERVAL_S, PullSession
from headrace_prefill.worker import PrefillWorker

log = logging.getLogger(__name__)

RETRY_S_MIN = 0.1
RETRY_S_MAX = 3.0

RouterKey: TypeAlias = tuple[str, str, str]
"""Id, incarnation and endpoint of a router."""


class TaskPuller:
    """Keeps one Pull stream to each router incarnation. Routers with tasks that wait share the slots equally."""

    def __init__(
        self,
        config: ServiceConfig,
        worker: PrefillWorker,
        *,
        model: str,
        layout: layout_pb2.KvLayout,
        adapters: Iterable[Adapter] = (),
    ) -> None:
        self._config = config
        self._worker = worker
        self._hello = prefill_pb2.Hello(
            worker_id=worker.ref.worker_id,
            incarnation=worker.ref.incarnation,
            model=model,
            layout=layout,
            adapters=map(adapter_to_proto, adapters),
            max_interval=duration_from_seconds(MAX_INTERVAL_S),
        )
        self._streams: dict[RouterKey, asyncio.Task[None]] = {}
        self._sessions: dict[RouterKey, PullSession] = {}
        self._draining = False

    def set_adapters(self, adapters: Iterable[Adapter]) -> None:
        """New streams announce these. Routers learn a change from the registry."""
        hello = prefill_pb2.Hello()
        hello.CopyFrom(self._hello)
        del hello.adapters[:]
        hello.adapters.extend(map(adapter_to_proto, adapters))
        self._hello = hello

    def set_routers(self, routers: Iterable[registry_pb2.Member]) -> None:
        """Opens streams to new routers, and ends those to routers that have left."""
        if self._draining:
            return
        wanted = {(router.worker_id, router.incarnation, router.endpoint) for router in routers}
        for left in self._streams.keys() - wanted:
            self._streams.pop(left).cancel()
        for key in wanted - self._streams.keys():
            self._streams[key] = asyncio.create_task(self._pull(key), name=f"pull from {key[0]}")
        self._grant_credit()

    async def drain(self, deadline: Deadline) -> None:
        """Refuses new tasks, and returns when every task has ended and been reported.

        At the deadline, running tasks are cancelled and reported with Draining. The caller bounds
        the wait for that.
        """
        self._draining = True
        self._worker.start_drain()
        sessions = tuple(self._sessions.values())
        drains = asyncio.gather(*(session.drain() for session in sessions))
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await asyncio.shield(drains)
        except TimeoutError:
            for session in sessions:
                session.cancel_tasks()
            await drains

    async def close(self) -> None:
        """Ends every stream; running tasks are cancelled first."""
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    def _grant_credit(self) -> None:
        """Gives free slots to the routers with the fewest tasks here.

        A router without a task has credit for an equal part of the slots, which takes no slot from the others.
        """
        slot_count = self._worker.slot_count
        sessions = [self._sessions[key] for key in self._streams if key in self._sessions]
        if len(self._streams) == 1:
            for session in sessions:
                session.grant(slot_count - session.granted)
            return
        part = max(1, slot_count // max(1, len(self._streams)))
        taken = sum(one.running + min(1, one.running, one.unused) for one in sessions)
        for session in sorted(sessions, key=lambda one: one.running):
            room = part - session.unused
            if session.running:
                room = min(room, slot_count - taken)
                taken += max(0, room)
            session.grant(room)

    async def _pull(self, key: RouterKey) -> None:
        router_id, _, endpoint = key
        retry_s = RETRY_S_MIN
        async with open_channel(endpoint, self._config) as channel:
            while not self._draining:
                session = PullSession(self._worker, self._hello, self._grant_credit)
                self._sessions[key] = session
                self._grant_credit()
                try:
                    await session.run(prefill_pb2_grpc.PrefillQueueServiceStub(channel))
                    log.info("router %s ended the pull stream", router_id)
                except grpc.aio.AioRpcError as rpc_error:
                    failure = error_from_rpc(rpc_error)
                    level = logging.INFO if isinstance(failure, Draining) else logging.WARNING
                    log.log(level, "pull from %s: %s", router_id, failure.detail)
                except QueueFull as error:
                    log.warning("pull from %s: %s", router_id, error.detail)
                finally:
                    if self._sessions.get(key) is session:
                        del self._sessions[key]
                    self._grant_credit()
                retry_s = RETRY_S_MIN if session.was_answered else min(RETRY_S_MAX, 2 * retry_s)
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
                await self._worker.wait_stepping()
