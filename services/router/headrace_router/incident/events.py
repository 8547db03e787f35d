"""The events of a router that its decisions follow from, and the decisions. None has anything of a prompt's content.

The policy and the members are events too, as messages of the registry. Events must not be changed: freezing one would
take most of the time to make it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace_common.callers.priority import Priority
from headrace_common.registry.adapters import Adapter
from headrace_common.time_model.model import TimeModel
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_router.placement import PlacementRequest
from headrace_router.prefill_queue.task import TaskTerms
from headrace_router.workers.table import Load, Worker


@dataclass(slots=True)
class TableMade:
    """A table of decode workers, each without load."""

    table: int
    workers: tuple[Worker, ...]


@dataclass(slots=True)
class LoadSet:
    """The load of one of them from now on."""

    table: int
    ref: WorkerRef
    load: Load


@dataclass(slots=True)
class Placed:
    """A decision of placement, with all that it depends on. See Candidates.

    `drawn`: which of equal or of cheap workers was drawn. `decision` is for people.
    """

    table: int
    request: PlacementRequest
    cached_tokens: tuple[float, ...] | None
    pulling: tuple[tuple[KvLayout, frozenset[WorkerRef]], ...]
    queue_wait_s: float
    pairs: tuple[tuple[bool, ...], tuple[float, ...]] | None
    prefill_times: TimeModel
    drawn: int
    decision: str


@dataclass(slots=True)
class QueueEmptied:
    """The prefill queue has no tasks. Its workers join again after this event."""

    restricted: frozenset[WorkerRef]


@dataclass(slots=True)
class WorkerJoined:
    """A prefill worker has opened its stream."""

    ref: WorkerRef
    model: str
    layout: KvLayout
    adapters: frozenset[Adapter]
    last_task_s: float = 0.0
    """When it got its last task, by the monotonic clock."""


@dataclass(slots=True)
class TaskQueued:
    """A task joined the queue."""

    transfer_id: str
    tokens: int
    start_token: int
    decode: WorkerRef
    adapter: Adapter | None
    layout: KvLayout
    terms: TaskTerms
    """Without `cached` and images."""
    cached: tuple[tuple[WorkerRef, int], ...]
    """Those of the terms."""


@dataclass(slots=True)
class TaskExpected:
    """A task will join the queue."""

    number: int
    layout: KvLayout
    tokens: int
    priority: Priority
    tenant: str


@dataclass(slots=True)
class QueueCall:
    """Another call of the queue, by the name of its method. `sent` is its decision: what a worker gets.

    `number` is that of credits, of cached tokens, or of an expected task. `reason` is why a task has failed.
    """

    call: str
    ref: WorkerRef | None = None
    transfer_id: str = ""
    number: int = 0
    reason: str = ""


@dataclass(slots=True)
class TimesReported:
    """A prefill worker has learned something."""

    ref: WorkerRef
    times: TimeModel


@dataclass(slots=True)
class QueueRestricted:
    """Workers that get only tasks that no other may take."""

    refs: frozenset[WorkerRef]


@dataclass(slots=True)
class PoolCall:
    """A call of a resource that tenants share, by the name of its method, with its result and the requests that waited
    and got units. `request` is the number of a request that may wait.
    """

    pool: int
    call: str
    tenant: str
    priority: Priority
    amount: int
    request: int
    result: bool
    granted: tuple[int, ...]


@dataclass(slots=True)
class PoolMade:
    """A pool of which nothing is used."""

    pool: int
    name: str
    capacity: int
    queue_above_share: bool
