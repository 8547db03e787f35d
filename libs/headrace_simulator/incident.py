"""Replays the events of a router: placement, the prefill queue and fair pools decide again, in virtual time.

They are those of this version. A decision that differs from the recorded one shows that the code differs, or that
something else than the events decides.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
from google.protobuf import json_format
from google.protobuf.message import Message

from headrace.incident.v1 import incident_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import HeadraceError, NoDecodeWorker
from headrace_common.process.events import event_from_json
from headrace_common.registry.adapters import adapter_to_proto
from headrace_frontend.admission.fair_share import CapacityRequest, FairPool, Grant
from headrace_kv.layout import WorkerRef
from headrace_router.costs import Candidates, PairCosts
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
from headrace_router.incident.recording import decision_text
from headrace_router.placement import KvAware
from headrace_router.prefill_queue.pairs import Pairing
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import QueuedTask
from headrace_router.prefill_queue.worker_stream import PrefillWorkerStream
from headrace_router.workers.table import LoadTable
from headrace_simulator.__main__ import EXIT_MISCONFIGURED
from headrace_simulator.incident_file import events_of, read_incident
from headrace_simulator.virtual_time import VirtualLoop, run_virtually

_TASKS_MAX: Final = 1_000_000
_KINDS: Final[Mapping[str, type]] = {
    kind.__name__: kind
    for kind in (
        *(QueueCall, QueueEmptied, QueueRestricted, TaskExpected, TaskQueued, TimesReported),
        *(WorkerJoined, LoadSet, Placed, PoolCall, PoolMade, TableMade),
    )
}
_MESSAGES: Final[Mapping[str, type[Message]]] = {
    "Policy": registry_pb2.Policy,
    "ListMembersResponse": registry_pb2.ListMembersResponse,
}


@dataclass(slots=True)
class Comparison:
    """Decisions of one kind, and the first one that differs."""

    compared: int = 0
    differing: int = 0
    first_ns: int = 0
    first: str = ""

    def add(self, monotonic_ns: int, recorded: object, replayed: object) -> None:
        """Compares a decision."""
        self.compared += 1
        if recorded != replayed:
            self.differing += 1
            if not self.first:
                self.first_ns = monotonic_ns
                self.first = f"recorded: {recorded}; replayed: {replayed}"


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay of one router has compared."""

    placement: Comparison = field(default_factory=Comparison)
    queue: Comparison = field(default_factory=Comparison)
    pools: Comparison = field(default_factory=Comparison)

    @property
    def kinds(self) -> Mapping[str, Comparison]:
        """By name."""
        return {"placement": self.placement, "prefill queue": self.queue, "fair pools": self.pools}


def replay(
    events: Iterable[incident_pb2.Event],
    new_placement: Callable[[Random], KvAware] = KvAware,
) -> Replay:
    """Replays the events of one router, oldest first."""
    return run_virtually(lambda: _Replayer(new_placement).run(events))


class _Draws(Random):
    """Draws what was drawn."""

    _next = 0

    def draw_next(self, index: int) -> None:
        """The next draw is this one."""
        self._next = index

    def randrange(self, *bounds: Any) -> int:
        return min(self._next, int(bounds[0]) - 1)

    def choices(self, population: Any, weights: Any = None, **options: Any) -> list[Any]:
        return [population[min(self._next, len(population) - 1)]]


class _Replayer:
    """The state of one router."""

    def __init__(self, new_placement: Callable[[Random], KvAware]) -> None:
        self._result = Replay()
        self._policy = registry_pb2.Policy()
        self._members: Sequence[registry_pb2.Member] = ()
        self._draws = _Draws()
        self._placement = new_placement(self._draws)
        self._tables: dict[int, LoadTable] = {}
        self._queue: _QueueReplay | None = None
        self._pools: dict[int, _PoolReplay] = {}

    async def run(self, events: Iterable[incident_pb2.Event]) -> Replay:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for number, one in enumerate(events):
            event = _read(one)
            if not number:
                loop.begin_at(one.monotonic_ns / 1e9)
            # No timer runs meanwhile: their ends are events, since a busy process ends them late.
            loop.pass_over(one.monotonic_ns / 1e9 - loop.time())
            self._handle(one.monotonic_ns, event)
        if self._queue is not None:
            self._queue.compare()
        return self._result

    def _handle(self, monotonic_ns: int, event: object) -> None:
        queue = self._queue
        match event:
            case registry_pb2.Policy():
                self._policy = event
            case registry_pb2.ListMembersResponse():
                self._members = event.members
                if queue is not None:
                    queue.update(self._members)
            case TableMade():
                self._tables[event.table] = LoadTable(event.workers)
            case LoadSet() if event.table in self._tables:
                self._tables[event.table].set(event.ref, event.load)
            case Placed() if event.table in self._tables:
                replayed = self._choose(event)
                self._result.placement.add(monotonic_ns, event.decision, replayed)
            case QueueEmptied():
                if queue is not None:
                    queue.compare()
                self._queue = _QueueReplay(event, self._result.queue, lambda: self._policy)
                self._queue.update(self._members)
            case PoolMade():
                self._pools[event.pool] = _PoolReplay(event, lambda: self._policy.tenant_weights)
            case PoolCall() if event.pool in self._pools:
                replayed = self._pools[event.pool].call(event)
                recorded = _pool_result(event.result, event.granted)
                self._result.pools.add(monotonic_ns, recorded, replayed)
            case _ if queue is not None:
                # The recorded queue has raised the same error.
                with suppress(HeadraceError):
                    queue.call(monotonic_ns, event)

    def _choose(self, event: Placed) -> str:
        pairs, cached = None, event.cached_tokens
        if event.pairs is not None:
            allowed, extra = event.pairs
            pairs = PairCosts(np.array(allowed, np.bool_), np.array(extra))
        candidates = Candidates(
            decode=self._tables[event.table],
            cached_tokens=None if cached is None else np.array(cached, np.float64),
            prefill=dict(event.pulling),
            queue_wait_s=event.queue_wait_s,
            pairs=pairs,
            prefill_times=event.prefill_times,
        )
        self._draws.draw_next(event.drawn)
        try:
            return decision_text(self._placement.choose(event.request, candidates))
        except NoDecodeWorker as error:
            return error.reason


class _QueueReplay:
    """A prefill queue that was empty. What it sends to each worker has to be what was sent."""

    def __init__(
        self,
        emptied: QueueEmptied,
        comparison: Comparison,
        policy: Callable[[], registry_pb2.Policy],
    ) -> None:
        self._comparison = comparison
        self._recorded: dict[WorkerRef, list[tuple[int, str]]] = {}
        self._replayed: dict[WorkerRef, list[str]] = {}
        self._pairing = Pairing(policy)
        self._queue = PrefillQueue(
            _TASKS_MAX,
            sign=self._sent,
            pairs=self._pairing,
            tenant_weights=lambda: policy().tenant_weights,
        )
        self._queue.restrict(emptied.restricted)
        self._tasks: dict[str, QueuedTask] = {}
        self._expected: dict[int, Callable[[], None]] = {}

    def update(self, members: Sequence[registry_pb2.Member]) -> None:
        """The members have changed."""
        self._queue.workers.update(members)
        self._pairing.update(members)

    def compare(self) -> None:
        """Compares what each worker got, in order."""
        for ref, sent in self._recorded.items():
            replayed = self._replayed.get(ref, [])
            for index, (monotonic_ns, recorded) in enumerate(sent):
                other = replayed[index] if index < len(replayed) else "nothing"
                who = ref.worker_id
                self._comparison.add(monotonic_ns, f"{who} gets {recorded}", f"{who} gets {other}")

    def call(self, monotonic_ns: int, event: object) -> None:
        """Makes a call of the queue. Other events are ignored."""
        queue = self._queue
        match event:
            case WorkerJoined():
                arguments = event.ref, event.model, event.layout, event.adapters
                queue.add_worker(*arguments).had_task(event.last_task_s)
            case QueueRestricted():
                queue.restrict(event.refs)
            case TaskQueued():
                self._enqueue(event)
            case TaskExpected():
                self._expected[event.number] = queue.expect_task(
                    event.layout, event.tokens, event.priority, event.tenant
                )
            case TimesReported() if stream := queue.workers.get(event.ref):
                queue.report_times(stream, event.times)
            case QueueCall(call="sent", ref=WorkerRef() as ref):
                self._recorded.setdefault(ref, []).append((monotonic_ns, event.transfer_id))
            case QueueCall(call="cancel") if task := self._tasks.get(event.transfer_id):
                task.cancel()
            case QueueCall(call="end_wait") if task := self._tasks.get(event.transfer_id):
                # Other code may not have let it wait.
                with suppress(KeyError):
                    queue.end_wait(task)
            case QueueCall(call="expected_no_more") if event.number in self._expected:
                self._expected.pop(event.number)()
            case QueueCall(ref=WorkerRef() as ref) if stream := queue.workers.get(ref):
                self._call_of_worker(stream, event)

    def _call_of_worker(self, stream: PrefillWorkerStream, event: QueueCall) -> None:
        if event.call == "remove_worker":
            self._queue.remove_worker(stream)
        elif event.call == "add_credits":
            self._queue.add_credits(stream, event.number)
        elif event.call == "task_started":
            self._queue.task_started(stream, event.transfer_id)
        elif event.call == "task_ended":
            self._tasks.pop(event.transfer_id, None)
            done = prefill_pb2.TaskDone(
                transfer_id=event.transfer_id,
                cached_tokens=event.number,
                reason=event.reason,
            )
            self._queue.task_ended(stream, done)

    def _sent(self, task: prefill_pb2.PrefillTask, prefill: WorkerRef, layout_hash: bytes) -> bytes:
        self._replayed.setdefault(prefill, []).append(task.transfer_id)
        stream = self._queue.workers.get(prefill)
        # Nothing else reads them.
        while stream is not None and not stream.outbox.empty():
            stream.outbox.get_nowait()
        return b""

    def _enqueue(self, event: TaskQueued) -> None:
        task = prefill_pb2.PrefillTask(
            transfer_id=event.transfer_id,
            token_ids=[0] * event.tokens,
            start_token=event.start_token,
            decode_worker_id=event.decode.worker_id,
            decode_incarnation=event.decode.incarnation,
            adapter=adapter_to_proto(event.adapter) if event.adapter is not None else None,
        )
        terms = replace(event.terms, cached=dict(event.cached))
        queued = self._queue.enqueue(task, layout=event.layout, terms=terms)
        self._tasks[event.transfer_id] = queued


class _PoolReplay:
    """A fair pool."""

    def __init__(self, made: PoolMade, weights: Callable[[], Mapping[str, float]]) -> None:
        self._pool = FairPool(made.capacity, weights, queue_above_share=made.queue_above_share)
        self._requests: dict[int, CapacityRequest] = {}
        self._granted: list[int] = []

    def call(self, call: PoolCall) -> str:
        """Makes a call, and returns its result."""
        self._granted.clear()
        return _pool_result(self._result_of(call), self._granted)

    def _result_of(self, call: PoolCall) -> bool:
        pool = self._pool
        match call.call:
            case "take":
                return pool.take(call.tenant, call.amount, call.priority)
            case "acquire":
                return pool.acquire(self._request(call)) is Grant.WAITING
            case "requeue":
                pool.requeue(self._request(call))
                return True
            case "cancel":
                request = self._requests.pop(call.request, None)
                return request is not None and pool.cancel(request)
            case "raise_limit":
                return pool.raise_limit(call.amount)
            case "release" if pool.used_by(call.tenant, call.priority) >= call.amount:
                pool.release(call.tenant, call.amount, call.priority)
            case "resize":
                pool.resize(call.amount)
        return False

    def _request(self, call: PoolCall) -> CapacityRequest:
        def granted() -> None:
            self._granted.append(call.request)
            self._requests.pop(call.request, None)

        request = CapacityRequest(call.tenant, call.amount, granted, call.priority)
        self._requests[call.request] = request
        return request


def _pool_result(done: bool, granted: Sequence[int]) -> str:
    waiting = f", and to waiting requests {', '.join(map(str, granted))}" if granted else ""
    return f"{'granted' if done else 'not granted'}{waiting}"


def _read(event: incident_pb2.Event) -> object:
    """None for an event that no decision depends on."""
    kind = _KINDS.get(event.kind)
    if kind is not None:
        return event_from_json(kind, event.value)
    message = _MESSAGES.get(event.kind)
    return None if message is None else json_format.Parse(event.value, message())


def main() -> int:
    """Replays the routers of the file that is named, and prints one JSON document."""
    try:
        members = read_incident(Path(sys.argv[1]))
    except HeadraceError as error:
        sys.stderr.write(f"{error.detail}\n")
        return EXIT_MISCONFIGURED
    routers = {
        name: {kind: asdict(one) for kind, one in replay(events_of(parts)).kinds.items()}
        for name, parts in members.items()
        if parts[0].member.role == registry_pb2.Member.ROLE_ROUTER
    }
    sys.stdout.write(json.dumps(routers) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
