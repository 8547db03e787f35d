"""Who is there: the registry's members joined with what each decode worker says of itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_kv.layout import KvLayout, WorkerRef, layout_from_proto

_LOG = logging.getLogger(__name__)

_STATUS_INTERVAL_S = 1
# A worker that says nothing for this long is taken for unreachable.
_SILENCE_S = 5.0
_RECONNECT_S = 0.5


@dataclass(frozen=True, slots=True)
class Worker:
    """One incarnation of a decode worker, as it registered."""

    ref: WorkerRef
    endpoint: str
    model: str
    context_tokens: int
    max_requests: int
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A decode worker at one moment.

    `requests` counts what it reported and what this router promised it since; `reserved_share` is
    from 0 to 1.
    """

    worker: Worker
    reachable: bool
    requests: int
    reserved_share: float


class Promise:
    """A request placed on a worker. Holds the worker's channel open until released."""

    def __init__(self, tracked: _Tracked) -> None:
        self._tracked = tracked
        self.made_monotonic_s = time.monotonic()
        self.channel = tracked.channel
        tracked.promises.add(self)

    def release(self) -> None:
        """The request has ended."""
        self._tracked.promises.discard(self)
        self._tracked.close_if_unused()


class _Tracked:
    """One decode worker: its channel, its latest status and what was promised to it."""

    def __init__(self, worker: Worker, channel: grpc.aio.Channel) -> None:
        self.worker = worker
        self.channel = channel
        self.promises: set[Promise] = set()
        self._status: worker_pb2.WatchStatusResponse | None = None
        self._status_monotonic_s = 0.0
        self._gone = False
        self._closing: asyncio.Task[None] | None = None
        self._watch = asyncio.create_task(self._watch_status())

    @property
    def draining(self) -> bool:
        status = self._status
        return status is not None and status.state == worker_pb2.WatchStatusResponse.STATE_DRAINING

    def load(self) -> WorkerLoad:
        status = self._status or worker_pb2.WatchStatusResponse()
        promised = sum(p.made_monotonic_s > self._status_monotonic_s for p in self.promises)
        reported = status.running_requests + status.waiting_requests
        taken_blocks = status.reserved_blocks + status.quarantined_blocks
        return WorkerLoad(
            worker=self.worker,
            reachable=self._status is not None,
            requests=max(reported + promised, len(self.promises)),
            reserved_share=min(1.0, taken_blocks / max(1, status.total_blocks)),
        )

    async def _watch_status(self) -> None:
        stub = worker_pb2_grpc.WorkerServiceStub(self.channel)
        request = worker_pb2.WatchStatusRequest(max_interval=Duration(seconds=_STATUS_INTERVAL_S))
        while True:
            try:
                call = stub.WatchStatus(request)
                while True:
                    async with asyncio.timeout(_SILENCE_S):
                        status: Any = await call.read()
                    if status is grpc.aio.EOF or status.incarnation != self.worker.ref.incarnation:
                        break
                    self._status = status
                    self._status_monotonic_s = time.monotonic()
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                if self._status is not None:
                    _LOG.warning("decode worker %s stopped reporting: %r", self.worker.ref, error)
            self._status = None
            await asyncio.sleep(_RECONNECT_S)

    def retire(self) -> None:
        """The worker has left the registry; requests on it may still end."""
        self._gone = True
        self._watch.cancel()
        self.close_if_unused()

    def close_if_unused(self) -> None:
        if self._gone and not self.promises and self._closing is None:
            self._closing = asyncio.create_task(self.close())

    async def close(self) -> None:
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch
        await self.channel.close()


class WorkerView:
    """The decode workers.

    One event loop owns it; `update` is called on every change of the registry's view.
    """

    def __init__(self, open_channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._open_channel = open_channel
        self._tracked: dict[WorkerRef, _Tracked] = {}

    def update(self, members: Iterable[registry_pb2.Member]) -> None:
        """Takes over the registry's decode members. Requests on those that left go on."""
        workers = {
            worker.ref: worker
            for worker in (
                worker_from_member(member)
                for member in members
                if member.role == registry_pb2.Member.ROLE_DECODE
            )
        }
        for ref in set(self._tracked) - set(workers):
            self._tracked.pop(ref).retire()
        for ref, worker in workers.items():
            tracked = self._tracked.get(ref)
            if tracked is not None and tracked.worker.endpoint == worker.endpoint:
                tracked.worker = worker
                continue
            if tracked is not None:
                tracked.retire()
            self._tracked[ref] = _Tracked(worker, self._open_channel(worker.endpoint))

    def loads(self, model: str) -> tuple[WorkerLoad, ...]:
        """The decode workers of `model` that take requests, with their load, by worker id."""
        return tuple(
            tracked.load()
            for _, tracked in sorted(self._tracked.items(), key=lambda item: str(item[0]))
            if tracked.worker.model == model and not tracked.draining
        )

    def context_tokens(self) -> dict[str, int]:
        """By model, the most tokens that every live decode worker of it takes."""
        contexts: dict[str, int] = {}
        for tracked in self._tracked.values():
            worker = tracked.worker
            contexts[worker.model] = min(
                contexts.get(worker.model, worker.context_tokens), worker.context_tokens
            )
        return contexts

    def decode_worker_counts(self) -> dict[str, int]:
        """Live decode workers by model."""
        counts: dict[str, int] = {}
        for tracked in self._tracked.values():
            counts[tracked.worker.model] = counts.get(tracked.worker.model, 0) + 1
        return counts

    def promise(self, ref: WorkerRef) -> Promise | None:
        """Counts a request as placed on the worker; None when it has left meanwhile."""
        tracked = self._tracked.get(ref)
        return None if tracked is None else Promise(tracked)

    async def close(self) -> None:
        """Closes every channel."""
        tracked, self._tracked = list(self._tracked.values()), {}
        await asyncio.gather(*(entry.close() for entry in tracked))


def worker_from_member(member: registry_pb2.Member) -> Worker:
    """A decode member in the router's words."""
    return Worker(
        ref=WorkerRef(member.worker_id, member.incarnation),
        endpoint=member.endpoint,
        model=member.model,
        context_tokens=member.context_tokens,
        max_requests=member.max_requests,
        layout=layout_from_proto(member.layout),
    )
