"""Replays the events of a router: placement, the prefill queue and fair pools decide again, in virtual time.

They are those of this version. A decision that differs from the recorded one shows that the code differs, or that
something else than the events decides.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from headrace.incident.v1 import incident_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.callers.priority import Priority
from headrace_common.errors import HeadraceError, NoDecodeWorker
from headrace_common.registry.adapters import adapter_from_proto, adapters_from_proto
from headrace_common.time_model.model import TimeModel, time_model_from_proto
from headrace_frontend.admission.fair_share import CapacityRequest, FairPool, Grant
from headrace_kv.layout import KvLayout, WorkerRef, layout_from_proto
from headrace_router.costs import Candidates, PairCosts, TokenTargets
from headrace_router.placement import KvAware, PlacementRequest, RoutePolicy
from headrace_router.prefill_queue.pairs import Pairing
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import QueuedTask, TaskTerms
from headrace_router.prefill_queue.worker_stream import PrefillWorkerStream
from headrace_router.workers.table import Load, LoadTable, PromptWork, Worker
from headrace_simulator.__main__ import EXIT_MISCONFIGURED
from headrace_simulator.incident_file import events_of, read_incident
from headrace_simulator.virtual_time import VirtualLoop, run_virtually

_TASKS_MAX: Final = 1_000_000
_Calls = incident_pb2.PoolCall


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
    events: Sequence[incident_pb2.Event],
    new_placement: Callable[[Random], KvAware] = KvAware,
) -> Replay:
    """Replays the events of one router, oldest first."""
    return run_virtually(lambda: _Replayer(new_placement).run(events))


class _Draws(Random):
    """Draws what was drawn."""

    next = 0

    def randrange(self, *bounds: Any) -> int:
        return min(self.next, int(bounds[0]) - 1)

    def choices(self, population: Any, weights: Any = None, **options: Any) -> list[Any]:
        return [population[min(self.next, len(population) - 1)]]


class _Replayer:
    """The state of one router."""

    def __init__(self, new_placement: Callable[[Random], KvAware]) -> None:
        self._result = Replay()
        self._policy = registry_pb2.Policy()
        self._members: Sequence[registry_pb2.Member] = ()
        self._layouts: list[KvLayout] = []
        self._draws = _Draws()
        self._placement = new_placement(self._draws)
        self._tables: dict[int, LoadTable] = {}
        self._times: dict[tuple[int, int], TimeModel] = {}
        self._pulling: Mapping[KvLayout, frozenset[WorkerRef]] = {}
        self._prefill_times = TimeModel()
        self._queue: _QueueReplay | None = None
        self._pools: dict[int, _PoolReplay] = {}

    async def run(self, events: Sequence[incident_pb2.Event]) -> Replay:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        if events:
            loop.begin_at(events[0].monotonic_ns / 1e9)
        for event in events:
            left_s = event.monotonic_ns / 1e9 - loop.time()
            # Timers of the queue alone make decisions.
            if event.HasField("queue"):
                await asyncio.sleep(left_s)
            else:
                loop.pass_over(left_s)
            self._layouts += map(layout_from_proto, event.new_layouts)
            self._handle(event)
        if self._queue is not None:
            self._queue.compare()
        return self._result

    def _handle(self, event: incident_pb2.Event) -> None:
        kind = event.WhichOneof("event")
        if kind == "policy":
            self._policy = event.policy
        elif kind == "members":
            self._members = event.members.members
            if self._queue is not None:
                self._queue.update(self._members)
        elif kind == "table":
            workers = [self._worker(worker) for worker in event.table.workers]
            self._tables[event.table.number] = LoadTable(workers)
        elif kind == "load":
            self._set_load(event.load)
        elif kind == "placement":
            self._place(event.monotonic_ns, event.placement)
        elif kind == "queue":
            self._call_queue(event)
        elif kind == "pool":
            self._call_pool(event.monotonic_ns, event.pool)

    def _worker(self, worker: incident_pb2.TableWorker) -> Worker:
        return Worker(
            ref=WorkerRef(worker.worker_id, worker.incarnation),
            endpoint="",
            model="",
            max_model_len=worker.max_model_len,
            max_num_seqs=worker.max_num_seqs,
            layout=self._layouts[worker.layout - 1],
            adapters=adapters_from_proto(worker.adapters),
            computes_prompts=worker.computes_prompts,
            role=worker.role,
        )

    def _set_load(self, change: incident_pb2.LoadChange) -> None:
        table, key = self._tables.get(change.table), (change.table, change.row)
        if change.HasField("times"):
            self._times[key] = time_model_from_proto(change.times, str(change.row))
        if table is None:
            return
        work = PromptWork(
            change.prompt_tokens,
            change.prompt_attended,
            change.head_tokens,
            change.head_attended,
            change.head_start_s,
        )
        load = Load(
            requests=change.requests,
            external_requests=change.external_requests,
            held_tokens=change.held_tokens,
            total_tokens=change.total_tokens,
            reachable=change.reachable,
            draining=change.draining,
            prompts=work,
            times=self._times.get(key, TimeModel()),
        )
        table.set(table.workers[change.row].ref, load)

    def _place(self, monotonic_ns: int, one: incident_pb2.Placement) -> None:
        if one.HasField("pulling"):
            self._pulling = {
                self._layouts[each.layout - 1]: _refs(each.workers) for each in one.pulling.layouts
            }
        if one.HasField("prefill_times"):
            self._prefill_times = time_model_from_proto(one.prefill_times, "prefill")
        table = self._tables.get(one.table)
        if table is None:
            return
        pairs = None
        if one.pair_allowed:
            pairs = PairCosts(np.array(one.pair_allowed, np.bool_), np.array(one.pair_extra))
        candidates = Candidates(
            decode=table,
            cached_tokens=np.array(one.cached_tokens) if one.cached_tokens else None,
            prefill=self._pulling,
            queue_wait_s=one.queue_wait_s,
            pairs=pairs,
            prefill_times=self._prefill_times,
        )
        self._draws.next = one.drawn
        recorded = one.error
        if not recorded:
            prefill = _ref(one.prefill) if one.HasField("prefill") else None
            recorded = _decision(table.workers[one.chosen].ref, one.remote, prefill)
        try:
            decision = self._placement.choose(_placement_request(one), candidates)
            replayed = _decision(decision.worker.ref, decision.remote, decision.prefill)
        except NoDecodeWorker as error:
            replayed = error.reason
        self._result.placement.add(monotonic_ns, recorded, replayed)

    def _call_queue(self, event: incident_pb2.Event) -> None:
        if event.queue.emptied:
            if self._queue is not None:
                self._queue.compare()
            self._queue = _QueueReplay(self._result.queue, lambda: self._policy, self._layouts)
            self._queue.update(self._members)
        elif self._queue is not None:
            # The real queue has raised the same error to the caller.
            with suppress(HeadraceError):
                self._queue.call(event.monotonic_ns, event.queue)

    def _call_pool(self, monotonic_ns: int, call: incident_pb2.PoolCall) -> None:
        if call.kind == _Calls.KIND_CREATE:
            self._pools[call.pool] = _PoolReplay(call, lambda: self._policy.tenant_weights)
        elif call.pool in self._pools:
            replayed = self._pools[call.pool].call(call)
            recorded = _pool_result(done=call.done, granted=call.granted)
            self._result.pools.add(monotonic_ns, recorded, replayed)


def _ref(ref: registry_pb2.MemberRef) -> WorkerRef:
    return WorkerRef(ref.worker_id, ref.incarnation)


def _refs(refs: Sequence[registry_pb2.MemberRef]) -> frozenset[WorkerRef]:
    return frozenset(map(_ref, refs))


def _decision(worker: WorkerRef, remote: bool, prefill: WorkerRef | None) -> str:
    where = f"remote prefill by {prefill or 'the queue'}" if remote else "local prefill"
    return f"{worker.worker_id}, {where}"


def _placement_request(one: incident_pb2.Placement) -> PlacementRequest:
    return PlacementRequest(
        model="",
        prompt_tokens=one.prompt_tokens,
        prefill_placement=one.prefill_placement,
        policy=RoutePolicy(
            one.local_prefill_max_tokens,
            one.overlap_weight,
            one.temperature,
            one.max_queue_wait_s if one.HasField("max_queue_wait_s") else None,
        ),
        remaining_s=one.remaining_s,
        failed=_refs(one.failed),
        suspect=_refs(one.suspect),
        local_only=one.local_only,
        adapter=adapter_from_proto(one.adapter) if one.HasField("adapter") else None,
        targets=TokenTargets(
            one.ttft_s if one.HasField("ttft_s") else None,
            one.tpot_s if one.HasField("tpot_s") else None,
            one.elapsed_s,
            one.answer_tokens,
        ),
        early_first=one.early_first,
    )


class _QueueReplay:
    """A prefill queue that was empty. What it sends to each worker has to be what was sent."""

    def __init__(
        self,
        comparison: Comparison,
        policy: Callable[[], registry_pb2.Policy],
        layouts: Sequence[KvLayout],
    ) -> None:
        self._comparison, self._layouts = comparison, layouts
        self._recorded: dict[WorkerRef, list[tuple[int, str]]] = {}
        self._replayed: dict[WorkerRef, list[str]] = {}
        self._pairing = Pairing(policy)
        self._queue = PrefillQueue(
            _TASKS_MAX,
            sign=self._sent,
            pairs=self._pairing,
            tenant_weights=lambda: policy().tenant_weights,
        )
        self._tasks: dict[str, QueuedTask] = {}
        self._expected: dict[int, Callable[[], None]] = {}

    def update(self, members: Sequence[registry_pb2.Member]) -> None:
        """The members have changed."""
        self._queue.workers.update_adapters(members)
        self._pairing.update(members)

    def compare(self) -> None:
        """Compares what each worker got, in order."""
        for ref, sent in self._recorded.items():
            replayed = self._replayed.get(ref, [])
            for index, (monotonic_ns, transfer_id) in enumerate(sent):
                other = replayed[index] if index < len(replayed) else "nothing"
                self._comparison.add(
                    monotonic_ns,
                    f"{ref.worker_id} gets {transfer_id}",
                    f"{ref.worker_id} gets {other}",
                )

    def call(self, monotonic_ns: int, one: incident_pb2.QueueCall) -> None:
        """Makes a call."""
        kind = one.WhichOneof("call")
        queue = self._queue
        if kind == "sent":
            sent = self._recorded.setdefault(_ref(one.sent.worker), [])
            sent.append((monotonic_ns, one.sent.transfer_id))
        elif kind == "joined":
            self._join(one.joined)
        elif kind == "restricted":
            queue.restrict(_refs(one.restricted.workers))
        elif kind == "task":
            self._enqueue(one.task)
        elif kind == "cancelled":
            task = self._tasks.get(one.cancelled)
            if task is not None:
                task.cancel()
        elif kind == "expected":
            self._expect(one.expected)
        elif kind == "left":
            stream = queue.workers.get(_ref(one.left))
            if stream is not None:
                queue.remove_worker(stream)
        elif kind == "message":
            stream = queue.workers.get(_ref(one.message.worker))
            if stream is not None:
                self._handle(stream, one.message.request)

    def _sent(self, task: prefill_pb2.PrefillTask, prefill: WorkerRef, layout_hash: bytes) -> bytes:
        self._replayed.setdefault(prefill, []).append(task.transfer_id)
        stream = self._queue.workers.get(prefill)
        if stream is not None:
            # Nothing else reads it.
            while not stream.outbox.empty():
                stream.outbox.get_nowait()
        return b""

    def _join(self, joined: incident_pb2.Joined) -> None:
        hello = joined.hello
        stream = self._queue.add_worker(
            WorkerRef(hello.worker_id, hello.incarnation),
            hello.model,
            layout_from_proto(hello.layout),
            adapters_from_proto(hello.adapters),
        )
        if joined.HasField("times"):
            times = time_model_from_proto(joined.times, hello.worker_id)
            self._queue.report_times(stream, times)
        if joined.credits:
            self._queue.add_credits(stream, joined.credits)

    def _enqueue(self, one: incident_pb2.QueuedTask) -> None:
        one.task.token_ids.extend([0] * one.tokens)
        terms = TaskTerms(
            deadline_s=one.deadline_s,
            avoid=_refs(one.avoid),
            cached={_ref(each.worker): each.tokens for each in one.cached},
            returns_max=one.returns_max,
            front=one.front,
            priority=Priority.from_proto(one.priority),
            tenant=one.tenant,
            planned=_ref(one.planned) if one.HasField("planned") else None,
        )
        layout = self._layouts[one.layout - 1]
        task = self._queue.enqueue(one.task, layout=layout, terms=terms)
        self._tasks[one.task.transfer_id] = task

    def _expect(self, one: incident_pb2.Expected) -> None:
        if one.ended:
            self._expected.pop(one.number, _nothing)()
            return
        self._expected[one.number] = self._queue.expect_task(
            self._layouts[one.layout - 1],
            one.tokens,
            Priority.from_proto(one.priority),
            one.tenant,
        )

    def _handle(self, stream: PrefillWorkerStream, request: prefill_pb2.PullRequest) -> None:
        kind = request.WhichOneof("message")
        if kind == "credit":
            self._queue.add_credits(stream, request.credit.task_count)
        elif kind == "started":
            self._queue.task_started(stream, request.started.transfer_id)
        elif kind == "done":
            self._tasks.pop(request.done.transfer_id, None)
            self._queue.task_ended(stream, request.done)


def _nothing() -> None:
    """A prompt that is expected by no replay."""


class _PoolReplay:
    """A fair pool."""

    def __init__(
        self, create: incident_pb2.PoolCall, weights: Callable[[], Mapping[str, float]]
    ) -> None:
        self._pool = FairPool(create.amount, weights, queue_above_share=create.done)
        self._requests: dict[int, CapacityRequest] = {}
        self._granted: list[int] = []

    def call(self, call: incident_pb2.PoolCall) -> str:
        """Makes a call, and returns its result."""
        self._granted.clear()
        done = self._call(call)
        return _pool_result(done=done, granted=self._granted)

    def _call(self, call: incident_pb2.PoolCall) -> bool:
        pool, priority = self._pool, Priority.from_proto(call.priority)
        if call.kind == _Calls.KIND_TAKE:
            return pool.take(call.tenant, call.amount, priority)
        if call.kind == _Calls.KIND_ACQUIRE:
            return pool.acquire(self._request(call)) is Grant.WAITING
        if call.kind == _Calls.KIND_REQUEUE:
            pool.requeue(self._request(call))
            return True
        if call.kind == _Calls.KIND_CANCEL:
            request = self._requests.pop(call.request, None)
            return request is not None and pool.cancel(request)
        if call.kind == _Calls.KIND_RAISE_LIMIT:
            return pool.raise_limit(call.amount)
        if call.kind == _Calls.KIND_RELEASE:
            if pool.used_by(call.tenant, priority) >= call.amount:
                pool.release(call.tenant, call.amount, priority)
        elif call.kind == _Calls.KIND_RESIZE:
            pool.resize(call.amount)
        return False

    def _request(self, call: incident_pb2.PoolCall) -> CapacityRequest:
        number = call.request

        def granted() -> None:
            self._granted.append(number)
            self._requests.pop(number, None)

        request = CapacityRequest(
            call.tenant, call.amount, granted, Priority.from_proto(call.priority)
        )
        self._requests[number] = request
        return request


def _pool_result(*, done: bool, granted: Sequence[int]) -> str:
    waiting = f", and to waiting requests {', '.join(map(str, granted))}" if granted else ""
    return f"{'granted' if done else 'not granted'}{waiting}"


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
