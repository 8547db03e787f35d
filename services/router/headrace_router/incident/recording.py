"""The parts of a router that decide, with each call stored as an event: placement, the prefill queue, fair pools.

They decide by their calls, their clock, the policy and the members alone. So a replay of the calls makes the same
decisions: headrace_simulator.incident.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import Any, Final
from weakref import WeakSet

from headrace.incident.v1 import incident_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.callers.priority import Priority
from headrace_common.errors import NoDecodeWorker
from headrace_common.registry.adapters import Adapter
from headrace_common.telemetry.events import EVENT_BYTES, EventRing
from headrace_frontend.admission.fair_share import CapacityRequest, FairPool, Grant
from headrace_frontend.tenants import DEFAULT_TENANT
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_router.costs import Candidates
from headrace_router.incident import messages
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
_Calls = incident_pb2.PoolCall


class RecordedTable(LoadTable):
    """A table with a number."""

    def __init__(self, workers: Sequence[Worker], events: EventRing, number: int) -> None:
        super().__init__(workers)
        self.number = number
        self._events = events
        self._store_workers()

    def set(self, ref: WorkerRef, load: Load) -> None:
        """See LoadTable."""
        super().set(ref, load)
        self._events.add(messages.describe_load, self.number, self._rows[ref], load)

    def checkpoint(self) -> None:
        """Stores the workers and their load again."""
        self._store_workers()
        for row, load in self._loads.items():
            self._events.add(messages.describe_load, self.number, row, load)

    def _store_workers(self) -> None:
        size = EVENT_BYTES + _WORKER_BYTES * len(self.workers)
        self._events.add(messages.describe_table, self.number, self.workers, size=size)


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
        table, self._draws.last = candidates.decode, 0
        try:
            decision = self._inner.choose(request, candidates)
        except NoDecodeWorker as error:
            self._store(request, candidates, error.reason)
            raise
        if isinstance(table, RecordedTable):
            self._store(request, candidates, decision)
        return decision

    def _store(
        self, request: PlacementRequest, candidates: Candidates, result: Decision | str
    ) -> None:
        table = candidates.decode
        if isinstance(table, RecordedTable):
            # It is a live view.
            pulling = tuple(candidates.prefill.items())
            size = _DECISION_BYTES + 8 * len(table)
            arguments = (table.number, request, candidates, pulling, self._draws.last, result)
            self._events.add(messages.describe_placement, *arguments, size=size)


class RecordedQueue(PrefillQueue):
    """A prefill queue."""

    def __init__(self, events: EventRing, max_queued_tasks: int, *, sign: SignTask, **options: Any):
        def recorded_sign(
            task: prefill_pb2.PrefillTask, prefill: WorkerRef, layout_hash: bytes
        ) -> bytes:
            events.add(messages.describe_sent, task.transfer_id, prefill)
            return sign(task, prefill, layout_hash)

        super().__init__(max_queued_tasks, sign=recorded_sign, **options)
        self._events = events
        self._expected = itertools.count(1)

    def expect_task(
        self,
        layout: KvLayout,
        tokens: int,
        priority: Priority = Priority.NORMAL,
        tenant: str = DEFAULT_TENANT,
    ) -> Callable[[], None]:
        """See PrefillQueue."""
        number = next(self._expected)
        arguments = number, layout, tokens, priority, tenant
        self._events.add(messages.describe_expected, *arguments)
        ended = super().expect_task(layout, tokens, priority, tenant)

        def recorded_end() -> None:
            self._events.add(messages.describe_expected_end, number)
            ended()

        return recorded_end

    def enqueue(
        self, task: prefill_pb2.PrefillTask, *, layout: KvLayout, terms: TaskTerms
    ) -> QueuedTask:
        """See PrefillQueue."""
        # The queue takes the tokens out of the task.
        arguments = task, len(task.token_ids), layout, terms
        self._events.add(messages.describe_task, *arguments, size=4 * EVENT_BYTES)
        return super().enqueue(task, layout=layout, terms=terms)

    def cancel(self, queued: QueuedTask) -> None:
        """See PrefillQueue."""
        self._events.add(messages.describe_cancelled, queued.task.transfer_id)
        super().cancel(queued)

    def add_worker(
        self,
        ref: WorkerRef,
        model: str,
        layout: KvLayout,
        adapters: frozenset[Adapter] = frozenset(),
    ) -> PrefillWorkerStream:
        """See PrefillQueue."""
        arguments = ref, model, layout, adapters
        self._events.add(messages.describe_joined, *arguments, size=_WORKER_BYTES)
        return super().add_worker(ref, model, layout, adapters)

    def remove_worker(self, stream: PrefillWorkerStream) -> None:
        """See PrefillQueue."""
        self._events.add(messages.describe_left, stream.ref)
        super().remove_worker(stream)

    def restrict(self, refs: frozenset[WorkerRef]) -> None:
        """See PrefillQueue."""
        self._events.add(messages.describe_restricted, refs)
        super().restrict(refs)

    def add_credits(self, stream: PrefillWorkerStream, task_count: int) -> None:
        """See PrefillQueue."""
        if task_count:
            self._events.add(messages.describe_credit, stream.ref, task_count)
        super().add_credits(stream, task_count)

    def task_started(self, stream: PrefillWorkerStream, transfer_id: str) -> None:
        """See PrefillQueue."""
        self._events.add(messages.describe_started, stream.ref, transfer_id)
        super().task_started(stream, transfer_id)

    def task_ended(self, stream: PrefillWorkerStream, done: prefill_pb2.TaskDone) -> None:
        """See PrefillQueue."""
        self._events.add(messages.describe_done, stream.ref, done, size=4 * EVENT_BYTES)
        super().task_ended(stream, done)

    def checkpoint(self) -> None:
        """Stores the workers again, unless there are tasks."""
        streams = [
            stream for group in self._groups.values() for stream in group.worker_streams.values()
        ]
        if self.depth or any(stream.tasks for stream in streams):
            return
        self._events.add(messages.describe_emptied)
        self._events.add(messages.describe_restricted, self.workers.restricted)
        for stream in sorted(streams, key=lambda one: one.number):
            group = self._group_of(stream)
            arguments = stream.ref, stream.model, group.layout, stream.adapters
            known = group.times.of(stream.ref)
            self._events.add(messages.describe_joined, *arguments, stream.credits, known)


class RecordedPool(FairPool):
    """A fair pool with a number."""

    def __init__(self, pool: FairPool, name: str, events: EventRing, number: int) -> None:
        """Does the same as `pool`, which is new."""
        super().__init__(pool.capacity, pool.weights, queue_above_share=pool.queue_above_share)
        self._name, self._events, self._number = name, events, number
        self._numbers = itertools.count(1)
        self._granted: list[int] = []
        self._waiting: dict[CapacityRequest, int] = {}
        self.checkpoint()

    def take(self, tenant: str, amount: int, priority: Priority = Priority.NORMAL) -> bool:
        """See FairPool."""
        done = super().take(tenant, amount, priority)
        self._store(_Calls.KIND_TAKE, tenant, priority, amount, done=done)
        return done

    def acquire(self, request: CapacityRequest) -> Grant:
        """See FairPool."""
        grant = super().acquire(request)
        if grant is not Grant.GRANTED:
            self._store_request(_Calls.KIND_ACQUIRE, request, done=grant is Grant.WAITING)
        return grant

    def requeue(self, request: CapacityRequest) -> None:
        """See FairPool."""
        super().requeue(request)
        self._store_request(_Calls.KIND_REQUEUE, request, done=True)

    def cancel(self, request: CapacityRequest) -> bool:
        """See FairPool."""
        number = self._waiting.pop(request, 0)
        done = super().cancel(request)
        if done:
            self._store(_Calls.KIND_CANCEL, *request.claimant, request.amount, number, done=done)
        return done

    def release(self, tenant: str, amount: int, priority: Priority = Priority.NORMAL) -> None:
        """See FairPool."""
        super().release(tenant, amount, priority)
        self._store(_Calls.KIND_RELEASE, tenant, priority, amount)

    def resize(self, capacity: int) -> None:
        """See FairPool."""
        super().resize(capacity)
        self._store(_Calls.KIND_RESIZE, amount=capacity)

    def raise_limit(self, units: int) -> bool:
        """See FairPool."""
        done = super().raise_limit(units)
        self._store(_Calls.KIND_RAISE_LIMIT, amount=units, done=done)
        return done

    def checkpoint(self) -> None:
        """Stores what is used again, unless requests wait."""
        if self.waiting or self.used > self.capacity or self.usable < self.capacity:
            return
        self._store(
            *(_Calls.KIND_CREATE, self._name),
            amount=self.capacity,
            done=self.queue_above_share,
        )
        for (tenant, priority), amount in self._used.items():
            self._store(_Calls.KIND_TAKE, tenant, priority, amount, done=True)

    def _store_request(
        self, kind: _Calls.Kind.ValueType, request: CapacityRequest, *, done: bool
    ) -> None:
        number = 0
        if done:
            number = self._waiting[request] = next(self._numbers)
            on_granted = request.on_granted

            def granted() -> None:
                self._granted.append(self._waiting.pop(request))
                on_granted()

            request.on_granted = granted
        self._store(kind, *request.claimant, request.amount, number, done=done)

    def _store(
        self,
        kind: _Calls.Kind.ValueType,
        tenant: str = "",
        priority: Priority = Priority.NORMAL,
        amount: int = 0,
        request: int = 0,
        *,
        done: bool = False,
    ) -> None:
        granted, self._granted = self._granted, []
        arguments = kind, tenant, priority, amount, request, done, granted
        self._events.add(messages.describe_pool_call, self._number, *arguments)


class Recorder:
    """Makes the parts of one router that decide, and stores the policy and the members that they depend on."""

    def __init__(self, events: EventRing, policy: Callable[[], registry_pb2.Policy]) -> None:
        self._events, self._policy = events, policy
        self._numbers = itertools.count(1)
        self._parts: WeakSet[RecordedTable | RecordedPool | RecordedQueue] = WeakSet()
        self._members: tuple[registry_pb2.Member, ...] = ()

    def placement(self) -> Placement:
        """Placement of this router."""
        return RecordedPlacement(self._events)

    def table(self, workers: Sequence[Worker]) -> LoadTable:
        """A new table."""
        table = RecordedTable(workers, self._events, next(self._numbers))
        self._parts.add(table)
        return table

    def pool(self, name: str, pool: FairPool) -> FairPool:
        """A pool that does the same as a new one."""
        recorded = RecordedPool(pool, name, self._events, next(self._numbers))
        self._parts.add(recorded)
        return recorded

    def queue(
        self,
        max_queued_tasks: int,
        *,
        sign: SignTask,
        pairs: Pairing,
    ) -> PrefillQueue:
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
        self._members = tuple(members)
        self._store_members()

    def checkpoint(self) -> None:
        """Stores the state of all parts anew."""
        self._store_members()
        for part in tuple(self._parts):
            part.checkpoint()

    def _store_members(self) -> None:
        self._events.add(messages.describe_policy, self._policy())
        size = EVENT_BYTES + _WORKER_BYTES * len(self._members)
        self._events.add(messages.describe_members, self._members, size=size)
