"""Who is there: the registry's members joined with what each decode worker says of itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.layout.proto import layout_from_proto
from headrace_router.workers.availability import WorkerAvailability
from headrace_router.workers.table import Load, LoadTable, Worker

_LOG = logging.getLogger(__name__)

_STATUS_INTERVAL_S = 1
# A worker that says nothing for this long is taken for unreachable.
_SILENCE_S = 3.0
_RECONNECT_S = 0.5


class Promise:
    """A request placed on a worker. Holds the worker's channel open until released."""

    def __init__(self, tracked: WorkerConnection, tokens: int) -> None:
        self._tracked = tracked
        self.tokens = tokens
        self.made_monotonic_s = time.monotonic()
        self.channel = tracked.channel
        tracked.promises.add(self)
        tracked.tell()

    def release(self) -> None:
        """The request has ended."""
        self._tracked.promises.discard(self)
        self._tracked.tell()
        self._tracked.close_if_unused()


class WorkerConnection:
    """One decode worker: its channel, its latest status and what was promised to it.

    `on_load` hears of every change of its load.
    """

    def __init__(
        self,
        worker: Worker,
        channel: grpc.aio.Channel,
        on_load: Callable[[WorkerConnection], None],
    ) -> None:
        self.worker = worker
        self.channel = channel
        self.promises: set[Promise] = set()
        self._on_load = on_load
        self._status: worker_pb2.WatchStatusResponse | None = None
        self._status_monotonic_s = 0.0
        self._gone = False
        self._closing: asyncio.Task[None] | None = None
        self._watch = asyncio.create_task(self._watch_status())

    def load(self) -> Load:
        """What it reported, and what this router promised it since."""
        status = self._status or worker_pb2.WatchStatusResponse()
        unreported = [p for p in self.promises if p.made_monotonic_s > self._status_monotonic_s]
        reported = status.running_requests + status.waiting_requests
        block_tokens = self.worker.layout.block_tokens
        held_blocks = status.reserved_blocks + status.quarantined_blocks
        return Load(
            requests=max(reported + len(unreported), len(self.promises)),
            # A report may have left the worker before it heard of the latest promises.
            held_tokens=max(
                held_blocks * block_tokens + sum(p.tokens for p in unreported),
                sum(p.tokens for p in self.promises),
            ),
            total_tokens=status.total_blocks * block_tokens,
            reachable=self._status is not None,
            draining=status.state == worker_pb2.WatchStatusResponse.STATE_DRAINING,
        )

    def external_request_count(self) -> int:
        """How many requests it reports beyond those promised to it."""
        if self._status is None:
            return 0
        reported = self._status.running_requests + self._status.waiting_requests
        return max(0, reported - len(self.promises))

    @property
    def distrusted(self) -> frozenset[WorkerRef]:
        """Prefill workers from which it takes nothing."""
        said = self._status.distrusted_workers if self._status is not None else ()
        return frozenset(WorkerRef(one.worker_id, one.incarnation) for one in said)

    def tell(self) -> None:
        """Says that its load has changed."""
        self._on_load(self)

    def _take(self, status: worker_pb2.WatchStatusResponse | None) -> None:
        if status is not None:
            self._status_monotonic_s = time.monotonic()
        elif self._status is None:
            return
        self._status = status
        self.tell()

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
                    self._take(status)
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                if self._status is not None:
                    _LOG.warning("decode worker %s stopped reporting: %r", self.worker.ref, error)
            self._take(None)
            await asyncio.sleep(_RECONNECT_S)

    def mark_unreachable(self) -> None:
        """A connection to it has broken: unreachable until it reports again."""
        self._take(None)

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


class WorkerDirectory:
    """The decode workers.

    One event loop owns it; `update` is called on every change of the registry's view.
    """

    def __init__(
        self, open_channel: Callable[[str], grpc.aio.Channel], worker_wait_s: float = 0.0
    ) -> None:
        """`worker_wait_s`: see RouterConfig."""
        self._open_channel = open_channel
        self._tracked: dict[WorkerRef, WorkerConnection] = {}
        self._tables: dict[str, LoadTable] = {}
        self._presence = WorkerAvailability(worker_wait_s)
        self._loaded = False

    def update(self, members: Iterable[registry_pb2.Member]) -> None:
        """Takes over the registry's decode members. Requests on those that left go on."""
        if not self._loaded:
            self._loaded = True
            self._presence.begin()
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
            channel = self._open_channel(worker.endpoint)
            self._tracked[ref] = WorkerConnection(worker, channel, self._note_load)
        self._make_tables()

    def table(self, model: str) -> LoadTable:
        """The decode workers of `model` and their load, kept up to date until members come or go."""
        return self._tables.get(model) or LoadTable(())

    def _make_tables(self) -> None:
        by_model: dict[str, list[WorkerConnection]] = {}
        for tracked in self._tracked.values():
            by_model.setdefault(tracked.worker.model, []).append(tracked)
        left = self._tables.keys() - by_model.keys()
        self._tables = {
            model: LoadTable(tracked.worker for tracked in members)
            for model, members in by_model.items()
        }
        for tracked in self._tracked.values():
            tracked_model = tracked.worker.model
            self._tables[tracked_model].set(tracked.worker.ref, tracked.load())
        for model in (*left, *self._tables):
            self._presence.note(model, self.table(model).answering)

    def _note_load(self, tracked: WorkerConnection) -> None:
        """Workers that left are nobody's candidates, whatever they say."""
        worker = tracked.worker
        table = self._tables.get(worker.model)
        if self._tracked.get(worker.ref) is tracked and table is not None:
            table.set(worker.ref, tracked.load())
            self._presence.note(worker.model, table.answering)

    async def wait_for_worker(self, model: str, deadline: Deadline) -> bool:
        """While no decode worker of `model` answers, and that is not so for long, waits for one; whether it did."""
        return await self._presence.wait(model, deadline)

    def max_model_len(self) -> dict[str, int]:
        """By model, the most tokens that every live decode worker of it takes."""
        contexts: dict[str, int] = {}
        for tracked in self._tracked.values():
            worker = tracked.worker
            contexts[worker.model] = min(
                contexts.get(worker.model, worker.max_model_len), worker.max_model_len
            )
        return contexts

    def decode_worker_counts(self) -> dict[str, int]:
        """Live decode workers by model."""
        counts: dict[str, int] = {}
        for tracked in self._tracked.values():
            counts[tracked.worker.model] = counts.get(tracked.worker.model, 0) + 1
        return counts

    def worker(self, ref: WorkerRef) -> Worker | None:
        """A live decode worker as it registered; None when it has left."""
        tracked = self._tracked.get(ref)
        return None if tracked is None else tracked.worker

    def external_request_count(self, ref: WorkerRef) -> int:
        """Requests that a worker reports and that this router has not placed there; 0 for one that has left."""
        tracked = self._tracked.get(ref)
        return 0 if tracked is None else tracked.external_request_count()

    def distrusted(self, ref: WorkerRef) -> frozenset[WorkerRef]:
        """Prefill workers that a decode worker says it takes nothing from."""
        tracked = self._tracked.get(ref)
        return frozenset() if tracked is None else tracked.distrusted

    def mark_unreachable(self, ref: WorkerRef) -> None:
        """A request's connection to the worker has broken: it comes after all others until it reports again."""
        tracked = self._tracked.get(ref)
        if tracked is not None:
            tracked.mark_unreachable()

    def promise(self, ref: WorkerRef, tokens: int) -> Promise | None:
        """Counts a request of `tokens` as placed on the worker; None when it has left meanwhile."""
        tracked = self._tracked.get(ref)
        return None if tracked is None else Promise(tracked, tokens)

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
        max_model_len=member.max_model_len,
        max_num_seqs=member.max_num_seqs,
        layout=layout_from_proto(member.layout),
    )
