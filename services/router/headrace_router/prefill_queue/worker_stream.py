"""Prefill workers that pull: the credits and tasks of each, and the order in which they get tasks."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from sortedcontainers import SortedDict

from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.errors import DuplicateTransfer, ProtocolViolation, QueueFull
from headrace_common.registry.adapters import Adapter, adapters_from_proto
from headrace_common.registry.duties import COMPUTE_PROMPTS
from headrace_common.tasks import BoundedQueue
from headrace_kv.compatibility import fingerprint, layout_hash
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_router.prefill_queue.task import QueuedTask, SignTask

WORKERS_MAX: Final = 4_096
CREDITS_MAX: Final = 1_024
# A worker with this many tokens to compute, in two tasks or more, gains nothing from a further task. It has work for
# two steps of the default size.
_BUSY_TOKENS: Final = 4_096
_BUSY_TASKS: Final = 2

_LoadKey: TypeAlias = tuple[int, int, float, int]


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """A prefill worker at one moment. `load_tokens` are those that it has still to compute."""

    tasks: int
    credits: int
    load_tokens: int
    retired: bool


class PrefillWorkerStream:
    """The stream of one prefill worker: its unused credits and the tasks that it has."""

    def __init__(
        self,
        ref: WorkerRef,
        model: str,
        layout: KvLayout,
        number: int,
        sign: SignTask,
        adapters: frozenset[Adapter] = frozenset(),
    ) -> None:
        self.ref = ref
        self.layout = layout
        self.model = model
        self.adapters = adapters
        """Those of new prompts."""
        self.usable_adapters = adapters
        """With those before the last change, which the worker keeps for prompts that were placed before."""
        self.group_key = fingerprint(layout)
        self.number = number
        self._sign = sign
        self._layout_hash = layout_hash(self.group_key)
        # A credit allows one PullResponse with a task, and each task at most one CancelTask.
        self.outbox: BoundedQueue[prefill_pb2.PullResponse] = BoundedQueue(
            f"pull {ref}", 4 * CREDITS_MAX
        )
        self.credits = 0
        self.load_tokens = 0
        self.last_task_s = 0.0
        self.retired = False
        """Whether the worker takes no more tasks."""
        self.restricted = False
        """See `restrict`."""
        self.member = registry_pb2.Member()
        """What the registry has of the worker. Empty until it is known."""
        self.tasks: dict[str, QueuedTask] = {}
        """Oldest first."""
        self.tenants: Counter[str] = Counter()
        """The number of tasks of each tenant."""
        self._received_s = 0.0
        # When the task before the oldest one ended.
        self._head_start_s = 0.0

    def had_task(self, time_s: float) -> None:
        """The worker got its last task then."""
        self.last_task_s = time_s

    def received_message(self) -> None:
        """The worker has sent something."""
        self._received_s = time.monotonic()

    def silent_since_s(self) -> float | None:
        """Since when the worker has had a task and sent nothing, by time.monotonic. None without tasks."""
        oldest = next(iter(self.tasks.values()), None)
        return None if oldest is None else max(self._received_s, oldest.pulled_s)

    @property
    def keeps_credit(self) -> bool:
        """Whether its only credit is kept for tenants that have no task on it: others have enough for it to compute.

        So a tenant with a short prompt need not wait until one of several long prompts ends.
        """
        busy = len(self.tasks) >= _BUSY_TASKS and self.load_tokens >= _BUSY_TOKENS
        return self.credits == 1 and busy

    @property
    def may_divide(self) -> bool:
        """Whether it can compute a prompt together with another worker now: it has nothing else to do."""
        idle = self.credits > 0 and not self.tasks and not self.restricted
        return idle and self.member.computes_beside

    def may_take(self, tenant: str) -> bool:
        """Whether a task of a tenant may have a credit."""
        return self.credits > 0 and not (self.keeps_credit and tenant in self.tenants)

    def load(self) -> PrefillLoad:
        """The worker's tasks and credits now."""
        return PrefillLoad(len(self.tasks), self.credits, self.load_tokens, self.retired)

    def add_credits(self, task_count: int) -> None:
        """The worker can take more tasks. Credits of a retired worker are ignored.

        Raises ProtocolViolation beyond CREDITS_MAX tasks and credits in all.
        """
        if self.credits + len(self.tasks) + task_count > CREDITS_MAX:
            raise ProtocolViolation(
                f"prefill worker {self.ref} asks for more than {CREDITS_MAX} tasks",
                metadata={"worker_id": self.ref.worker_id, "credits_max": str(CREDITS_MAX)},
            )
        if not self.retired:
            self.credits += task_count

    def update(self, member: registry_pb2.Member) -> None:
        """The worker announces this."""
        self.member = member
        adapters = adapters_from_proto(member.adapters)
        if adapters != self.adapters:
            self.usable_adapters = adapters | self.adapters
            self.adapters = adapters

    def restrict(self, restricted: bool) -> None:
        """Whether the worker gets only tasks that no other worker may take, from now on."""
        self.restricted = restricted

    def retire(self) -> None:
        """The worker takes no more tasks. The tasks that it has may still end."""
        self.retired = True
        self.credits = 0

    def send_task(self, queued: QueuedTask, now_s: float) -> None:
        """Sends the worker a task, for one credit."""
        self.credits -= 1
        self.last_task_s = now_s
        self.load_tokens += queued.tokens - queued.cached_tokens(self.ref)
        self.tasks[queued.task.transfer_id] = queued
        self.tenants[queued.tenant] += 1
        queued.handed_to(self.ref, now_s)
        self.outbox.put_nowait(queued.message(self.ticket(queued.task)))

    def ticket(self, task: prefill_pb2.PrefillTask) -> bytes:
        """The worker's handoff ticket for a task."""
        return self._sign(task, self.ref, self._layout_hash)

    def send_cancel(self, transfer_id: str) -> None:
        """Asks the worker to stop a task."""
        cancel = prefill_pb2.CancelTask(transfer_id=transfer_id)
        self.outbox.put_nowait(prefill_pb2.PullResponse(cancel=cancel))

    def task_ended(self, queued: QueuedTask) -> None:
        """The worker no longer has this task."""
        if queued is next(iter(self.tasks.values())):
            self._head_start_s = time.monotonic()
        del self.tasks[queued.task.transfer_id]
        self.tenants[queued.tenant] -= 1
        if not self.tenants[queued.tenant]:
            del self.tenants[queued.tenant]
        self.load_tokens -= queued.tokens - queued.cached_tokens(self.ref)

    def has_room_within(
        self, wait_s: float, *, tasks_ahead: int, token_s: float, now_s: float
    ) -> bool:
        """Whether the worker is likely to end `tasks_ahead` + 1 of its tasks within `wait_s`.

        It computes them in order, each token in `token_s`.
        """
        first = tuple(itertools.islice(self.tasks.values(), tasks_ahead + 1))
        if len(first) <= tasks_ahead:
            return False
        tokens = sum(queued.counted_tokens for queued in first)
        return max(self._head_start_s, first[0].pulled_s) + token_s * tokens <= now_s + wait_s


class ConnectedWorkers:
    """The prefill workers with an open stream, of all layouts. Retired workers are among them."""

    def __init__(self) -> None:
        self._restricted: frozenset[WorkerRef] = frozenset()
        self._streams: dict[WorkerRef, PrefillWorkerStream] = {}
        self._pulling: dict[KvLayout, frozenset[WorkerRef]] = {}
        self._members: dict[WorkerRef, registry_pb2.Member] = {}

    @property
    def restricted(self) -> frozenset[WorkerRef]:
        """The workers of the last `restrict`."""
        return self._restricted

    def get(self, ref: WorkerRef) -> PrefillWorkerStream | None:
        """The stream of a worker. None when it has none."""
        return self._streams.get(ref)

    def add(self, stream: PrefillWorkerStream) -> None:
        """A worker has opened its stream.

        Raises DuplicateTransfer when this incarnation has one already, and QueueFull beyond WORKERS_MAX.
        """
        ref = stream.ref
        if ref in self._streams:
            raise DuplicateTransfer(
                f"prefill worker {ref} pulls already; end its other stream first",
                metadata={"worker_id": ref.worker_id, "incarnation": ref.incarnation},
            )
        if len(self._streams) >= WORKERS_MAX:
            raise QueueFull(
                f"{WORKERS_MAX} prefill workers pull already",
                metadata={"maxsize": str(WORKERS_MAX)},
            )
        stream.restrict(ref in self._restricted)
        self._streams[ref] = stream
        if ref in self._members:
            stream.update(self._members[ref])

    def remove(self, stream: PrefillWorkerStream) -> None:
        """A worker's stream has ended."""
        del self._streams[stream.ref]

    def restrict(self, refs: frozenset[WorkerRef]) -> bool:
        """These workers get only tasks that no other worker may take when they connect. False if that is no change."""
        changed = refs != self._restricted
        self._restricted = refs
        return changed

    def update_pulling(self, layout: KvLayout, streams: Iterable[PrefillWorkerStream]) -> None:
        """The workers of a layout that take tasks, or their restrictions, have changed to these."""
        refs = frozenset(stream.ref for stream in streams if not stream.restricted)
        if refs:
            self._pulling[layout] = refs
        else:
            self._pulling.pop(layout, None)

    def update(self, members: Iterable[registry_pb2.Member]) -> None:
        """From now on, connected workers get new tasks by what the registry has of them, such as their adapters."""
        found = (one for one in members if one.role in COMPUTE_PROMPTS)
        self._members = {WorkerRef(one.worker_id, one.incarnation): one for one in found}
        for ref in self._members.keys() & self._streams.keys():
            self._streams[ref].update(self._members[ref])

    def pulling(self, adapter: Adapter | None = None) -> Mapping[KvLayout, frozenset[WorkerRef]]:
        """The workers that take tasks, by layout fingerprint: all, or those with an adapter.

        Restricted workers are left out. Without an adapter it is a live view: it changes with the queue.
        """
        if adapter is None:
            return self._pulling
        return {
            layout: frozenset(ref for ref in refs if adapter in self._streams[ref].adapters)
            for layout, refs in self._pulling.items()
        }

    def counts(self) -> dict[str, int]:
        """The number of workers by served model."""
        return Counter(stream.model for stream in self._streams.values())

    def counts_by_adapter(self) -> dict[tuple[str, Adapter], int]:
        """The number of workers by served model and adapter."""
        return Counter(
            (stream.model, adapter)
            for stream in self._streams.values()
            for adapter in stream.adapters
        )

    def loads(self) -> dict[WorkerRef, PrefillLoad]:
        """The load of every worker."""
        return {ref: stream.load() for ref, stream in self._streams.items()}


class WorkersWithCredits:
    """The workers that can be sent a task now, ordered by load."""

    def __init__(self) -> None:
        self.credits = 0
        """Unused credits of all workers, without those that are kept and those of restricted workers."""
        self._by_load: SortedDict[_LoadKey, PrefillWorkerStream] = SortedDict()
        self._key_of: dict[WorkerRef, _LoadKey] = {}
        self._credits_of: dict[WorkerRef, int] = {}

    def update(self, stream: PrefillWorkerStream) -> None:
        """The credits or the load of a worker may have changed."""
        key = self._key_of.pop(stream.ref, None)
        if key is not None:
            del self._by_load[key]
            self.credits -= self._credits_of.pop(stream.ref)
        if stream.credits:
            key = (stream.load_tokens, -stream.credits, stream.last_task_s, stream.number)
            self._by_load[key] = stream
            self._key_of[stream.ref] = key
            kept = stream.keeps_credit or stream.restricted
            self._credits_of[stream.ref] = 0 if kept else stream.credits
            self.credits += self._credits_of[stream.ref]

    def best_for(self, queued: QueuedTask, *, restricted: bool) -> PrefillWorkerStream | None:
        """The worker with the fewest tokens to compute once it has this task, plus the cost of the hand-over.

        `restricted`: whether restricted workers may get it.
        """
        key = None if queued.planned is None else self._key_of.get(queued.planned)
        if key is not None:
            planned: PrefillWorkerStream = self._by_load[key]
            if _may_take(planned, queued, restricted):
                return planned
        if queued.extra_tokens is not None:
            return self._best_pair(queued, queued.extra_tokens, restricted)
        best: PrefillWorkerStream | None = next(
            (one for one in self._by_load.values() if _may_take(one, queued, restricted)), None
        )
        if best is None or not queued.cached:
            return best
        least = best.load_tokens - queued.cached_tokens(best.ref)
        for ref, cached_tokens in queued.cached.items():
            # Even an idle worker with this prefix would not be better.
            if -cached_tokens >= least:
                continue
            key = self._key_of.get(ref)
            if key is None:
                continue
            stream: PrefillWorkerStream = self._by_load[key]
            if not _may_take(stream, queued, restricted):
                continue
            tokens = stream.load_tokens - queued.cached_tokens(ref)
            if tokens < least:
                best, least = stream, tokens
        return best

    def _best_pair(
        self, queued: QueuedTask, extra_tokens: Callable[[WorkerRef], float], restricted: bool
    ) -> PrefillWorkerStream | None:
        best: PrefillWorkerStream | None = None
        least = math.inf
        cached_most = max(queued.cached.values(), default=0)
        for stream in self._by_load.values():
            # All others have at least this load.
            if stream.load_tokens - cached_most >= least:
                break
            if not _may_take(stream, queued, restricted):
                continue
            tokens = stream.load_tokens - queued.cached_tokens(stream.ref)
            tokens += extra_tokens(stream.ref)
            if tokens < least:
                best, least = stream, tokens
        return best


def _may_take(stream: PrefillWorkerStream, queued: QueuedTask, restricted: bool) -> bool:
    if stream.ref in queued.avoid or (stream.restricted and not restricted):
        return False
    return stream.may_take(queued.tenant)
