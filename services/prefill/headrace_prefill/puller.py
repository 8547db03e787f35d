"""Pulls tasks from every live router."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable

import grpc.aio

from headrace.kv.v1 import layout_pb2
from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace_common.config import ServiceConfig
from headrace_common.deadlines import Deadline
from headrace_common.errors import QueueFull
from headrace_common.registry.adapters import Adapter, adapter_to_proto
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_prefill.pull_session import PullSession
from headrace_prefill.worker import PrefillWorker

log = logging.getLogger(__name__)

RETRY_S_MIN = 0.1
RETRY_S_MAX = 3.0


class TaskPuller:
    """Keeps one Pull stream to each router incarnation, and divides the worker's slots among them."""

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
        )
        self._streams: dict[tuple[str, str, str], asyncio.Task[None]] = {}
        self._sessions: set[PullSession] = set()
        self._draining = False

    @property
    def credit_share(self) -> int:
        """Tasks that each router may have on this worker, waiting or running."""
        return max(1, self._worker.slot_count // max(1, len(self._streams)))

    def set_routers(self, routers: Iterable[registry_pb2.Member]) -> None:
        """Opens streams to new routers, and ends those to routers that have left."""
        if self._draining:
            return
        wanted = {(router.worker_id, router.incarnation, router.endpoint) for router in routers}
        for left in self._streams.keys() - wanted:
            self._streams.pop(left).cancel()
        for key in wanted - self._streams.keys():
            self._streams[key] = asyncio.create_task(
                self._pull(key[0], key[2]), name=f"pull from {key[0]}"
            )
        for session in self._sessions:
            session.set_credit_share(self.credit_share)

    async def drain(self, deadline: Deadline) -> None:
        """Refuses new tasks, and returns when every task has ended and been reported.

        At the deadline, running tasks are cancelled and reported with Draining. The caller bounds
        the wait for that.
        """
        self._draining = True
        self._worker.start_drain()
        sessions = set(self._sessions)
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

    async def _pull(self, router_id: str, endpoint: str) -> None:
        retry_s = RETRY_S_MIN
        async with open_channel(endpoint, self._config) as channel:
            while not self._draining:
                session = PullSession(self._worker, self._hello, self.credit_share)
                self._sessions.add(session)
                try:
                    await session.run(prefill_pb2_grpc.PrefillQueueServiceStub(channel))
                    log.info("router %s ended the pull stream", router_id)
                except grpc.aio.AioRpcError as rpc_error:
                    log.warning("pull from %s: %s", router_id, error_from_rpc(rpc_error).detail)
                except QueueFull as error:
                    log.warning("pull from %s: %s", router_id, error.detail)
                finally:
                    self._sessions.discard(session)
                retry_s = RETRY_S_MIN if session.was_answered else min(RETRY_S_MAX, 2 * retry_s)
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
