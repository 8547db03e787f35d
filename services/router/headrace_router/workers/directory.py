"""The decode workers: the registry's members joined with the status that each of them reports."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import grpc.aio

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.deadlines import Deadline
from headrace_common.process.pacing import LoopLoad, heartbeat_interval_s
from headrace_common.registry.adapters import adapters_from_proto
from headrace_common.registry.duties import GENERATE, WorkerRoles, role_by_policy
from headrace_common.tasks import OWN_DELAY_S, wait_briefly
from headrace_frontend.request.model_names import Adapters
from headrace_kv.layout import KvLayout, WorkerRef, layout_from_proto
from headrace_router.workers.connection import LoadReservation, WorkerConnection
from headrace_router.workers.dials import Dials
from headrace_router.workers.table import DecodeSlots, Load, LoadTable, Worker
from headrace_router.workers.under_way import PromptsUnderWay, PromptUnderWay


class WorkerAvailability:
    """Tracks which models have a reachable decode worker. Owned by one event loop.

    A router that has just started has no workers yet. Workers that the registry has lost register again within
    seconds. So a request waits while its model has been unavailable for less than `grace_s`, and never after that.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._available: set[str] = set()
        # By model. A model that was never available counts as unavailable since the start.
        self._unavailable_since_s: dict[str, float] = {}
        self._start_s = time.monotonic()
        self._changed = asyncio.Event()

    def start(self) -> None:
        """The registry's first view has arrived: the grace of models that were never available begins now."""
        self._start_s = time.monotonic()

    def update(self, model: str, available: bool) -> None:
        """Sets whether a decode worker of `model` is reachable now."""
        if available == (model in self._available):
            return
        now_s = time.monotonic()
        if available:
            self._available.add(model)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            return
        self._available.discard(model)
        self._unavailable_since_s[model] = now_s
        # An entry past its grace has the same effect as the start time.
        self._unavailable_since_s = {
            name: since_s
            for name, since_s in self._unavailable_since_s.items()
            if now_s - since_s < self._grace_s
        }

    async def wait(self, model: str, deadline: Deadline) -> bool:
        """Waits until `model` is available, or its grace or the deadline is over. Returns whether it had to wait."""
        waited = False
        while model not in self._available:
            since_s = self._unavailable_since_s.get(model, self._start_s)
            left_s = min(since_s + self._grace_s - time.monotonic(), deadline.remaining_s())
            if left_s <= 0:
                break
            waited = True
            await wait_briefly(self._changed.wait(), left_s)
        return waited


# A new table costs a time that grows with the number of workers. Workers that join together share one.
_REBUILD_INTERVAL_S: Final = 0.05
_TICK_S: Final = 0.25
_LAYOUTS_MAX: Final = 64
_NO_WORKERS: Final = LoadTable(())


@dataclass(frozen=True, slots=True)
class _Registered:
    member: registry_pb2.Member
    worker: Worker


def _ignore() -> None:
    """There is no prompt to compute."""


class WorkerDirectory:
    """The decode workers and their load, by model. One event loop owns it.

    A registered worker is used, and counted, once it has reported its status to this router. `update` must be called
    on every change of the registry's view, the policy included.
    """

    def __init__(
        self,
        open_channel: Callable[[str], grpc.aio.Channel],
        ticket_public_key: bytes,
        worker_wait_s: float = 0.0,
        on_slots: Callable[[str, DecodeSlots], None] | None = None,
        dials: Dials | None = None,
        load: LoopLoad | None = None,
        worker_roles: Callable[[], WorkerRoles] = dict,
        new_table: Callable[[Sequence[Worker]], LoadTable] = LoadTable,
        on_leaving: Callable[[WorkerRef], None] = lambda worker: None,
    ) -> None:
        """`ticket_public_key` is this router's. `worker_wait_s`: see RouterConfig.

        `on_slots` gets a model and the slots of its workers after each change. `dials` bounds the tries to reach
        members, and may be shared. `load` is that of the event loop: see DecodeLink. `worker_roles` returns those of
        the policy. `new_table` makes the tables. `on_leaving` gets a worker that answers are to leave, once or more.
        """
        self._open_channel = open_channel
        self._ticket_public_key = ticket_public_key
        self._dials = dials or Dials()
        self._load = load
        self._worker_roles = worker_roles
        self._new_table = new_table
        self._on_leaving = on_leaving
        self._registered: dict[WorkerRef, _Registered] = {}
        self._connections: dict[WorkerRef, WorkerConnection] = {}
        self.under_way = PromptsUnderWay()
        """The prompts of `expect_prompt` that are not computed."""
        self._tables: dict[str, LoadTable] = {}
        self._reserved: set[WorkerConnection] = set()
        """Those with other reservations than their table shows."""
        # What all tables say of their models, which they never change.
        self._max_model_len: Mapping[str, int] = {}
        self._adapters: Adapters = {}
        self._availability = WorkerAvailability(worker_wait_s)
        self.wait_for_worker = self._availability.wait
        """Waits for a reachable decode worker. Returns whether it had to wait."""
        self._on_slots = on_slots
        self._slots: dict[str, DecodeSlots] = {}
        # Of workers that are stuck. Their requests leave as soon as another worker can have them.
        self._stuck: set[WorkerConnection] = set()
        self._router_count = 1
        self._rebuild: asyncio.TimerHandle | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._next_rebuild_s = 0.0

    def update(self, members: Iterable[registry_pb2.Member]) -> None:
        """Replaces the decode workers by the registry's. Requests on workers that left continue."""
        if self._ticking is None:
            self._availability.start()
            self._tick()
        members = tuple(members)
        routers = sum(member.role == registry_pb2.Member.ROLE_ROUTER for member in members)
        changed = self._router_count != max(1, routers)
        self._router_count = max(1, routers)
        roles = self._worker_roles()
        registered = (self._convert(member, roles) for member in members if member.role in GENERATE)
        self._registered = {one.worker.ref: one for one in registered}
        for ref in self._connections.keys() - self._registered.keys():
            self._connections.pop(ref).retire()
            changed = True
        interval_s = heartbeat_interval_s(len(self._registered))
        for ref, one in self._registered.items():
            worker = one.worker
            if worker.role == registry_pb2.WORKER_ROLE_PREFILL:
                self._on_leaving(ref)
            connection = self._connections.get(ref)
            if connection is not None and connection.worker.endpoint == worker.endpoint:
                changed = changed or connection.worker != worker
                connection.registered(worker, interval_s)
                continue
            if connection is not None:
                connection.retire()
                changed = True
            self._connections[ref] = WorkerConnection(
                worker,
                self._open_channel,
                self._dials,
                self._update_load,
                self._reserved.add,
                self._ticket_public_key,
                interval_s,
                self._load,
            )
        # A new worker has no row before it has reported.
        if changed:
            self._rebuild_tables()

    def _convert(self, member: registry_pb2.Member, worker_roles: WorkerRoles) -> _Registered:
        """Most members are the same objects as before."""
        known = self._registered.get(WorkerRef(member.worker_id, member.incarnation))
        role = role_by_policy(member, worker_roles)
        if known is not None and known.member is member and known.worker.role == role:
            return known
        worker = replace(worker_from_member(member), role=role)
        if known is not None:
            before = known.worker
            changed = before.adapters != worker.adapters
            earlier = before.adapters if changed else before.earlier_adapters
            worker = replace(worker, earlier_adapters=earlier)
        return _Registered(member, worker)

    @property
    def decode_only(self) -> frozenset[WorkerRef]:
        """The workers of both roles to which the policy leaves decode."""
        role = registry_pb2.WORKER_ROLE_DECODE
        return frozenset(ref for ref, one in self._registered.items() if one.worker.role == role)

    def leaves(self, ref: WorkerRef) -> bool:
        """Whether answers are to leave this worker, or it has left the registry."""
        connection = self._connections.get(ref)
        if connection is None or connection.worker.role == registry_pb2.WORKER_ROLE_PREFILL:
            return True
        return connection.load().leaving

    def table(self, model: str, *, fresh: bool = True) -> LoadTable:
        """The decode workers of `model`, and if `fresh` their load at this moment, not before the last reservations."""
        while fresh and self._reserved:
            self._update_load(self._reserved.pop())
        return self._tables.get(model, _NO_WORKERS)

    def max_model_len(self) -> Mapping[str, int]:
        """By model, the most tokens that every live decode worker of it accepts."""
        return self._max_model_len

    def adapters(self) -> Adapters:
        """By model, the adapters of its live decode workers by name. Of one name, the adapter of most workers."""
        return self._adapters

    def decode_worker_counts(self) -> dict[str, int]:
        """The number of live decode workers by model."""
        return {model: len(table) for model, table in self._tables.items()}

    def loads(self) -> dict[WorkerRef, Load]:
        """The load of every worker that has reported its status."""
        return {
            ref: connection.load()
            for ref, connection in self._connections.items()
            if connection.has_reported
        }

    def worker(self, ref: WorkerRef) -> Worker | None:
        """A live decode worker as it registered. None when it has left."""
        connection = self._connections.get(ref)
        return None if connection is None else connection.worker

    def channel_of(self, incarnation: str) -> grpc.aio.Channel | None:
        """The channel to a live decode worker that has reported its status."""
        found = (one for ref, one in self._connections.items() if ref.incarnation == incarnation)
        connection = next(found, None)
        if connection is None or not connection.has_reported:
            return None
        return connection.channel

    def distrusted(self, ref: WorkerRef) -> Mapping[WorkerRef, str]:
        """Prefill workers from which a decode worker rejects transfers, and why."""
        connection = self._connections.get(ref)
        return {} if connection is None else connection.distrusted

    def clock_offsets_s(self) -> dict[str, float]:
        """By worker id, how far the worker's wall clock is ahead of this router's."""
        return {
            ref.worker_id: connection.clock.offset_s()
            for ref, connection in self._connections.items()
            if connection.clock.known
        }

    def mark_unreachable(self, ref: WorkerRef) -> None:
        """A connection to the worker has broken. Placement prefers all others until it reports again."""
        connection = self._connections.get(ref)
        if connection is not None:
            connection.mark_unreachable()

    def reserve_load(
        self, ref: WorkerRef, tokens: int, *, routed: bool = True
    ) -> LoadReservation | None:
        """Counts a request of `tokens` as placed on the worker. None when the worker has left or never reported.

        `routed`: whether this router sends the request now, rather than a client that may never do so.
        """
        connection = self._connections.get(ref)
        if connection is None or not connection.has_reported:
            return None
        return connection.reserve(tokens, routed=routed)

    def expect_prompt(
        self, prompt: PromptUnderWay, tokens: int, cached_tokens: int
    ) -> Callable[[], None]:
        """Counts a prompt as work of its worker, which is to compute `tokens` after the cached ones.

        It counts until the result is called, which may be repeated. Not at all when the worker has left.
        """
        connection = self._connections.get(prompt.ref)
        if connection is None or not tokens:
            return _ignore
        self.under_way.add(prompt)
        number = connection.prompts.add(tokens, time.monotonic(), cached_tokens)
        connection.prompts_changed()

        def computed() -> None:
            if self.under_way.remove(prompt):
                connection.prompts.remove(number, time.monotonic())
                connection.prompts_changed()

        return computed

    async def close(self) -> None:
        """Closes every channel."""
        for timer in (self._rebuild, self._ticking):
            if timer is not None:
                timer.cancel()
        connections, self._connections = list(self._connections.values()), {}
        await asyncio.gather(*(connection.close() for connection in connections))

    def _tick(self, due_s: float = math.inf) -> None:
        """No worker is late because this event loop is. Called before the timers of workers that are due later."""
        loop = asyncio.get_running_loop()
        if (late_s := loop.time() - due_s) > OWN_DELAY_S:
            for connection in self._connections.values():
                connection.wait_longer(late_s)
        due_s = loop.time() + _TICK_S
        self._ticking = loop.call_at(due_s, self._tick, due_s)

    def _schedule_rebuild(self) -> None:
        """Rebuilds the tables soon: at once after a pause, else with all that report meanwhile."""
        if self._rebuild is None:
            loop = asyncio.get_running_loop()
            self._rebuild = loop.call_at(self._next_rebuild_s, self._rebuild_tables)

    def _rebuild_tables(self) -> None:
        if self._rebuild is not None:
            self._rebuild.cancel()
            self._rebuild = None
        self._next_rebuild_s = asyncio.get_running_loop().time() + _REBUILD_INTERVAL_S
        by_model: dict[str, list[WorkerConnection]] = {}
        for connection in self._connections.values():
            if connection.has_reported:
                by_model.setdefault(connection.worker.model, []).append(connection)
        unserved = self._tables.keys() - by_model.keys()
        for model in unserved:
            del self._tables[model]
        for model, connections in by_model.items():
            self._rebuild_table(model, connections)
        tables = self._tables.items()
        self._max_model_len = {model: table.max_model_len for model, table in tables}
        self._adapters = {model: table.adapters for model, table in tables if table.adapters}
        for model in (*unserved, *self._tables):
            self._table_changed(model)

    def _rebuild_table(self, model: str, connections: Iterable[WorkerConnection]) -> None:
        """Makes a new table, unless the workers are those of the present one."""
        rows = sorted(connections, key=lambda connection: str(connection.worker.ref))
        workers = tuple(connection.worker for connection in rows)
        known = self._tables.get(model)
        if known is not None and known.workers == workers:
            return
        table = self._tables[model] = self._new_table(workers)
        for connection in rows:
            table.set(connection.worker.ref, connection.load())

    def _update_load(self, connection: WorkerConnection) -> None:
        worker, load = connection.worker, connection.load()
        if load.leaving:
            self._on_leaving(worker.ref)
        # A worker that has left may still report.
        if self._connections.get(worker.ref) is not connection or not connection.has_reported:
            return
        table = self._tables.get(worker.model)
        if table is None or worker.ref not in table:
            self._schedule_rebuild()
            return
        known = table.load(worker.ref)
        if load == known:
            return
        table.set(worker.ref, load)
        if load.stalled:
            self._stuck.add(connection)
        else:
            self._stuck.discard(connection)
        if known is None or load.availability != known.availability:
            self._table_changed(worker.model)

    def _table_changed(self, model: str) -> None:
        table = self.table(model)
        self._availability.update(model, table.any_available)
        slots = table.slots(self._router_count)
        known = self._slots.pop(model, None)
        if len(table):
            self._slots[model] = slots
        if slots != known and self._on_slots is not None:
            self._on_slots(model, slots)
        for connection in tuple(self._stuck):
            if not connection.stuck or connection.closing:
                self._stuck.discard(connection)
            elif connection.worker.model == model and table.any_beside(connection.worker):
                connection.end_requests()


def worker_from_member(member: registry_pb2.Member) -> Worker:
    """Converts a decode member of the registry."""
    return Worker(
        ref=WorkerRef(member.worker_id, member.incarnation),
        endpoint=member.endpoint,
        http_endpoint=member.http_endpoint,
        model=member.model,
        max_model_len=member.max_model_len,
        max_num_seqs=member.max_num_seqs,
        step_tokens=member.max_num_batched_tokens,
        layout=_layout_of(member.layout.SerializeToString(deterministic=True)),
        adapters=adapters_from_proto(member.adapters),
        computes_prompts=member.role == registry_pb2.Member.ROLE_BOTH,
    )


@lru_cache(maxsize=_LAYOUTS_MAX)
def _layout_of(serialized: bytes) -> KvLayout:
    """Equal layouts are one object: most workers of a deployment have the same."""
    return layout_from_proto(layout_pb2.KvLayout.FromString(serialized))
