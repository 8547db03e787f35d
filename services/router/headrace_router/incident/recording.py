"""The parts of a router that decide, with each call stored as an event: placement, the prefill queue, fair pools.

They decide by their calls, their clock, the policy and the members alone. So a replay of the calls makes the same
decisions: headrace_simulator.incident.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final
from weakref import WeakSet

from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.callers.priority import Priority
from headrace_common.errors import NoDecodeWorker
from headrace_common.process.events import EVENT_BYTES, EventRing
from headrace_common.registry.adapters import Adapter, adapter_from_proto
from headrace_common.time_model.model import TimeModel
from headrace_frontend.admission.fair_share import FairPool
from headrace_frontend.tenants import DEFAULT_TENANT
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_router.costs import Candidates
from headrace_router.incident.events import (
    LoadSet,
    Placed,
    PoolCall,
    PoolMade,
    QueueCall,
    QueueEmptied,
    QueueRestricted,
    TableMade,
    TaskExpected,
    TaskQueued,
    TimesReported,
    WorkerJoined,
)
from headrace_router.placement import Decision, KvAware, Placement, PlacementRequest
from headrace_router.prefill_queue.pairs import Pairing
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import QueuedTask, SignTask, TaskTerms
from headrace_router.prefill_queue.worker_stream import PrefillWorkerStream
from headrace_router.workers.table import Load, LoadTable, Worker

CHECKPOINT_S: Final = 60.0
"""After this time, state is stored anew: a reader needs no older events."""
_WORKER_BYTES: Final = 512
_DECISION_BYTES: Final = 1_536
# Of learned times, of those of one link, and of a worker in a list.
_TIMES_BYTES: Final = 768
_LINK_BYTES: Final = 384
_ENTRY_BYTES: Final = 96


def _times_bytes(times: TimeModel) -> int:
    return _TIMES_BYTES + _LINK_BYTES * len(times.links)


class RecordedTable(LoadTable):
    """A table with a number."""

    def __init__(self, workers: Sequence[Worker], events: EventRing, number: int) -> None:
        super().__init__(workers)
        self.number = number
        self._events = events
        self._store_workers()

    def set(self, ref: WorkerRef, load: Load) -> None:
        """See LoadTable."""
        before = self._loads.get(self._rows[ref])
        LoadTable.set(self, ref, load)
        is_new = before is None or before.times is not load.times
        size = 2 * EVENT_BYTES + (_times_bytes(load.times) if is_new else 0)
        self._events.add(LoadSet(self.number, ref, load), size)

    def checkpoint(self) -> None:
        """Stores the workers and their load again."""
        self._store_workers()
        for row, load in self._loads.items():
            size = 2 * EVENT_BYTES + _times_bytes(load.times)
            self._events.add(LoadSet(self.number, self.workers[row].ref, load), size)

    def _store_workers(self) -> None:
        size = EVENT_BYTES + _WORKER_BYTES * len(self.workers)
        self._events.add(TableMade(self.number, self.workers), size)


class Draws(Random):
    """Remembers which of several choices it has drawn."""

    last = 0

    def randrange(self, *bounds: Any) -> int:
        """See Random."""
        self.last = super().randrange(*bounds)
        return self.last

    def choices(self, population: Any, weights: Any = None, **options: Any) -> list[Any]:
        """One choice. See Random."""
        (self.last,) = super().choices(range(len(population)), weights, **options)
        return [population[self.last]]


class RecordedPlacement(Placement):
    """KvAware."""

    def __init__(self, events: EventRing) -> None:
        self._events = events
        self._draws = Draws()
        self._inner = KvAware(self._draws)

    def choose(self, request: PlacementRequest, candidates: Candidates) -> Decision:
        """See Placement."""
        self._draws.last = 0
        # What was learned ages during the choice too.
        begin_ns = time.monotonic_ns()
        try:
            decision = self._inner.choose(request, candidates)
        except NoDecodeWorker as error:
            self._store(request, candidates, error.reason, begin_ns)
            raise
        self._store(request, candidates, decision_text(decision), begin_ns)
        return decision

    def _store(
        self, request: PlacementRequest, candidates: Candidates, decision: str, begin_ns: int
    ) -> None:
        table, cached, pairs = candidates.decode, candidates.cached_tokens, candidates.pairs
        if not isinstance(table, RecordedTable):
            # The model has no workers.
            return
        placed = Placed(
            table.number,
            request,
            None if cached is None else tuple(cached.tolist()),
            # It is a live view.
            tuple(candidates.prefill.items()),
            candidates.queue_wait_s,
            None if pairs is None else (tuple(pairs.allowed.tolist()), tuple(pairs.extra.tolist())),
            candidates.prefill_times,
            self._draws.last,
            decision,
        )
        self._events.add(placed, _DECISION_BYTES + _ENTRY_BYTES * len(table.workers), begin_ns)


def decision_text(decision: Decision) -> str:
    """What was decided."""
    if not decision.remote:
        return f"{decision.worker.ref.worker_id}, local prefill"
    by = decision.prefill.worker_id if decision.prefill is not None else "the queue"
    part = f" below token {decision.computes_from}" if decision.computes_from else ""
    return f"{decision.worker.ref.worker_id}, remote prefill{part} by {by}"


class RecordedQueue(PrefillQueue):
    """A prefill queue."""

    def __init__(self, events: EventRing, max_queued_tasks: int, *, sign: SignTask, **options: Any):
        def recorded_sign(
            task: prefill_pb2.PrefillTask, prefill: WorkerRef, layout_hash: bytes
        ) -> bytes:
            events.add(QueueCall("sent", prefill, task.transfer_id))
            return sign(task, prefill, layout_hash)

        super().__init__(max_queued_tasks, sign=recorded_sign, **options)
        self._events = events
        self._expected = itertools.count(1)
        self._layouts: dict[WorkerRef, KvLayout] = {}
        """Of the workers. A group has what their layouts share."""

    def expect_task(
        self,
        layout: KvLayout,
        tokens: int,
        priority: Priority = Priority.NORMAL,
        tenant: str = DEFAULT_TENANT,
    ) -> Callable[[], None]:
        """See PrefillQueue."""
        number = next(self._expected)
        self._events.add(TaskExpected(number, layout, tokens, priority, tenant))
        ended = super().expect_task(layout, tokens, priority, tenant)

        def recorded_end() -> None:
            self._events.add(QueueCall("expected_no_more", number=number))
            ended()

        return recorded_end

    def enqueue(
        self, task: prefill_pb2.PrefillTask, *, layout: KvLayout, terms: TaskTerms
    ) -> QueuedTask:
        """See PrefillQueue."""
        queued = TaskQueued(
            task.transfer_id,
            len(task.token_ids),
            task.start_token,
            WorkerRef(task.decode_worker_id, task.decode_incarnation),
            adapter_from_proto(task.adapter) if task.HasField("adapter") else None,
            layout,
            replace(terms, cached={}, images=()),
            tuple(terms.cached.items()),
        )
        size = 4 * EVENT_BYTES + _ENTRY_BYTES * len(queued.cached)
        self._events.add(queued, size)
        return super().enqueue(task, layout=layout, terms=terms)

    def cancel(self, queued: QueuedTask) -> None:
        """See PrefillQueue."""
        self._events.add(QueueCall("cancel", transfer_id=queued.task.transfer_id))
        super().cancel(queued)

    def add_worker(
        self,
        ref: WorkerRef,
        model: str,
        layout: KvLayout,
        adapters: frozenset[Adapter] = frozenset(),
    ) -> PrefillWorkerStream:
        """See PrefillQueue."""
        joined = WorkerJoined(ref, model, layout, adapters)
        # A worker has chosen the size of its layout.
        self._events.add(joined, _WORKER_BYTES + 4 * len(repr(joined)))
        stream = super().add_worker(ref, model, layout, adapters)
        self._layouts[ref] = layout
        return stream

    def remove_worker(self, stream: PrefillWorkerStream) -> None:
        """See PrefillQueue."""
        self._events.add(QueueCall("remove_worker", stream.ref))
        del self._layouts[stream.ref]
        super().remove_worker(stream)

    def restrict(self, refs: frozenset[WorkerRef]) -> None:
        """See PrefillQueue."""
        if refs != self.workers.restricted:
            self._events.add(QueueRestricted(refs))
        super().restrict(refs)

    def end_wait(self, queued: QueuedTask) -> None:
        """See PrefillQueue."""
        self._events.add(QueueCall("end_wait", transfer_id=queued.task.transfer_id))
        super().end_wait(queued)

    def add_credits(self, stream: PrefillWorkerStream, task_count: int) -> None:
        """See PrefillQueue."""
        if task_count:
            self._events.add(QueueCall("add_credits", stream.ref, number=task_count))
        super().add_credits(stream, task_count)

    def task_started(self, stream: PrefillWorkerStream, transfer_id: str) -> None:
        """See PrefillQueue."""
        # A worker has chosen its length.
        self._events.add(
            QueueCall("task_started", stream.ref, transfer_id), EVENT_BYTES + len(transfer_id)
        )
        super().task_started(stream, transfer_id)

    def task_ended(self, stream: PrefillWorkerStream, done: prefill_pb2.TaskDone) -> None:
        """See PrefillQueue."""
        arguments = stream.ref, done.transfer_id, done.cached_tokens, done.reason
        size = EVENT_BYTES + len(done.transfer_id) + len(done.reason)
        self._events.add(QueueCall("task_ended", *arguments), size)
        super().task_ended(stream, done)

    def report_times(self, stream: PrefillWorkerStream, times: TimeModel) -> None:
        """See PrefillQueue."""
        self._events.add(TimesReported(stream.ref, times), EVENT_BYTES + _times_bytes(times))
        super().report_times(stream, times)

    def checkpoint(self) -> None:
        """Stores the workers again, unless there are tasks."""
        groups = self._groups.values()
        streams = [stream for group in groups for stream in group.worker_streams.values()]
        if self.depth or any(stream.tasks for stream in streams):
            return
        self._events.add(QueueEmptied(self.workers.restricted))
        for stream in sorted(streams, key=lambda one: one.number):
            layout = self._layouts[stream.ref]
            arguments = stream.ref, stream.model, layout, stream.adapters, stream.last_task_s
            joined = WorkerJoined(*arguments)
            self._events.add(joined, _WORKER_BYTES)
            times = self._group_of(stream).times.of(stream.ref)
            if times is not None:
                size = EVENT_BYTES + _times_bytes(times)
                self._events.add(TimesReported(stream.ref, times), size)
            if stream.credits:
                self._events.add(QueueCall("add_credits", stream.ref, number=stream.credits))


class Recorder:
    """Makes the parts of one router that decide, and stores the policy and the members that they depend on."""

    def __init__(self, events: EventRing, policy: Callable[[], registry_pb2.Policy]) -> None:
        self._events, self._policy = events, policy
        self._numbers = itertools.count(1)
        self._parts: WeakSet[RecordedTable | RecordedQueue] = WeakSet()
        self._pools: dict[int, tuple[str, FairPool]] = {}
        """Those of this router, which end with it, by number."""
        self._members = registry_pb2.ListMembersResponse()

    def placement(self) -> Placement:
        """Placement of this router."""
        return RecordedPlacement(self._events)

    def table(self, workers: Sequence[Worker]) -> LoadTable:
        """A new table."""
        table = RecordedTable(workers, self._events, next(self._numbers))
        self._parts.add(table)
        return table

    def pool(self, name: str, pool: FairPool) -> FairPool:
        """Stores the calls of a new pool, which it returns."""
        number, add = next(self._numbers), self._events.add
        pool.watch(lambda *call: add(PoolCall(number, *call)))
        self._pools[number] = name, pool
        self._store_pool(number)
        return pool

    def _store_pool(self, number: int) -> None:
        """Stores what is used, unless requests wait."""
        name, pool = self._pools[number]
        if pool.waiting or pool.used > pool.capacity or pool.usable < pool.capacity:
            return
        self._events.add(PoolMade(number, name, pool.capacity, pool.queue_above_share))
        for (tenant, priority), amount in pool.parts.items():
            self._events.add(PoolCall(number, "take", tenant, priority, amount, 0, True, ()))

    def queue(self, max_queued_tasks: int, *, sign: SignTask, pairs: Pairing) -> PrefillQueue:
        """The prefill queue."""
        queue = RecordedQueue(
            self._events,
            max_queued_tasks,
            sign=sign,
            pairs=pairs,
            tenant_weights=lambda: self._policy().tenant_weights,
        )
        self._parts.add(queue)
        queue.checkpoint()
        return queue

    def update(self, members: Collection[registry_pb2.Member]) -> None:
        """The members or the policy have changed."""
        self._members = registry_pb2.ListMembersResponse(
            members=[
                registry_pb2.Member(
                    worker_id=member.worker_id,
                    incarnation=member.incarnation,
                    role=member.role,
                    place=member.place if member.HasField("place") else None,
                    adapters=member.adapters,
                    max_num_batched_tokens=member.max_num_batched_tokens,
                    computes_beside=member.computes_beside,
                )
                for member in members
            ]
        )
        self._store_members()

    def checkpoint(self) -> None:
        """Stores the state of all parts anew."""
        self._store_members()
        for part in tuple(self._parts):
            part.checkpoint()
        for number in self._pools:
            self._store_pool(number)

    def _store_members(self) -> None:
        self._events.add(self._policy())
        self._events.add(self._members, EVENT_BYTES + _WORKER_BYTES * len(self._members.members))
