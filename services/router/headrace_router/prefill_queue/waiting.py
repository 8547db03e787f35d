"""Tasks of one group that wait, in the order in which they are handed out. Pure but for the clock."""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Generic, TypeAlias, TypeVar

from sortedcontainers import SortedDict

from headrace_common.callers.priority import Priority
from headrace_kv.layout import WorkerRef
from headrace_router.prefill_queue.task import QueuedTask, TaskOrder

Claimant = TypeVar("Claimant", bound=Hashable)


class WeightedTurns(Generic[Claimant]):
    """The start tags of the claimants of one queue. `weight` returns the current weight of a claimant."""

    def __init__(self, weight: Callable[[Claimant], float]) -> None:
        self._weight = weight
        self._starts: dict[Claimant, float] = {}
        self._busy: dict[Claimant, float] = {}
        """The claimants with tasks, and the weight of each when it got the first of them."""
        self._busy_weight = 0.0
        self._now = 0.0
        """The tag of the last task that was handed out."""
        self._end = 0.0
        """The largest tag."""

    def start(self, claimant: Claimant) -> float:
        """The tag of a claimant with tasks. The one with the smallest is next."""
        return self._starts[claimant]

    def became_busy(self, claimant: Claimant) -> None:
        """A claimant that had no task has one."""
        if not self._busy:
            self._now = self._end
            self._starts.clear()
        self._starts[claimant] = max(self._starts.get(claimant, 0.0), self._now)
        self._busy[claimant] = self._weight(claimant)
        self._busy_weight += self._busy[claimant]

    def became_idle(self, claimant: Claimant) -> None:
        """A claimant has no task any more."""
        self._busy_weight -= self._busy.pop(claimant)

    def handed_out(self, claimant: Claimant, tokens: int) -> None:
        """A task of so many tokens to compute was handed out."""
        start = self._starts.get(claimant, self._now)
        self._now = max(self._now, start)
        self._move(claimant, start + max(1, tokens) / self._weight(claimant))

    def corrected(self, claimant: Claimant, tokens: int) -> None:
        """A task that was handed out took so many tokens more, or fewer if negative."""
        start = self._starts.get(claimant, self._now)
        self._move(claimant, max(start + tokens / self._weight(claimant), min(start, self._now)))

    def others_weight(self, claimant: Claimant) -> float:
        """The weight of all other claimants with tasks."""
        return max(0.0, self._busy_weight - self._busy.get(claimant, 0.0))

    def _move(self, claimant: Claimant, start: float) -> None:
        self._starts[claimant] = start
        self._end = max(self._end, start)


def amount_ahead(own: float, weight: float, others: Iterable[tuple[float, float]]) -> float:
    """What is handed out before the end of `own` of a claimant: `own` itself, and the shares of the others.

    `others` are the amount, in the same unit, and the weight of other claimants. None gets more than it has.
    """
    per_weight = own / weight
    return own + sum(min(amount, per_weight * other) for amount, other in others)


Turn: TypeAlias = tuple[float, int]
"""Tenants are served by it, smallest first. It is unique for each tenant of a class."""


class TaskLanes:
    """Waiting tasks of one class, in one lane for each set of excluded workers.

    The next task for a worker is the first of some lane. To find it is independent of the numbers of tasks and tenants.
    """

    def __init__(self, turn: Callable[[str], Turn]) -> None:
        """`turn` returns the turn of a tenant with tasks."""
        self._turn = turn
        self._lanes: dict[frozenset[WorkerRef], _Lane] = {}
        self._excluded: dict[int, frozenset[WorkerRef]] = {}

    def add(self, queued: QueuedTask, excluded: frozenset[WorkerRef]) -> None:
        """Adds a task that these workers may not get."""
        self._excluded[queued.number] = excluded
        lane = self._lanes.get(excluded)
        if lane is None:
            lane = self._lanes[excluded] = _Lane()
        lane.add(queued, self._turn(queued.tenant))

    def remove(self, queued: QueuedTask) -> None:
        """Removes a task that is in a lane."""
        excluded = self._excluded.pop(queued.number)
        lane = self._lanes[excluded]
        lane.remove(queued)
        if not lane.turns:
            del self._lanes[excluded]

    def update_turn(self, tenant: str) -> None:
        """The turn of a tenant with tasks has changed."""
        turn = self._turn(tenant)
        for lane in self._lanes.values():
            lane.update_turn(tenant, turn)

    def tasks_before(self, tenant: str, order: TaskOrder) -> int:
        """The number of tasks of a tenant that are handed out before one with this order."""
        return sum(lane.tasks_before(tenant, order) for lane in self._lanes.values())

    def first_for(
        self,
        ref: WorkerRef,
        without_tenants: Collection[str] = (),
        may_take: Callable[[frozenset[WorkerRef]], bool] | None = None,
    ) -> QueuedTask | None:
        """The first task that the worker may get, of other tenants than these.

        `may_take` decides by the workers that a task may not go to. None takes all.
        """
        lanes = (
            lane
            for excluded, lane in self._lanes.items()
            if ref not in excluded and (may_take is None or may_take(excluded))
        )
        firsts = (lane.first(without_tenants) for lane in lanes)
        return min(
            (queued for queued in firsts if queued is not None),
            key=lambda queued: (self._turn(queued.tenant), queued.order),
            default=None,
        )


class _Lane:
    """Tasks by the turn of their tenant, and then in the order of the tenant's tasks. Never empty for long."""

    def __init__(self) -> None:
        self.turns: SortedDict[Turn, SortedDict[TaskOrder, QueuedTask]] = SortedDict()
        self._turn_of: dict[str, Turn] = {}

    def first(self, without_tenants: Collection[str]) -> QueuedTask | None:
        """The task that is next, of other tenants than these."""
        for tasks in self.turns.values():
            queued: QueuedTask = tasks.peekitem(0)[1]
            if queued.tenant not in without_tenants:
                return queued
        return None

    def add(self, queued: QueuedTask, turn: Turn) -> None:
        tasks = self.turns.get(turn)
        if tasks is None:
            tasks = self.turns[turn] = SortedDict()
            self._turn_of[queued.tenant] = turn
        tasks[queued.order] = queued

    def remove(self, queued: QueuedTask) -> None:
        turn = self._turn_of[queued.tenant]
        tasks = self.turns[turn]
        del tasks[queued.order]
        if not tasks:
            del self.turns[turn], self._turn_of[queued.tenant]

    def update_turn(self, tenant: str, turn: Turn) -> None:
        before = self._turn_of.get(tenant)
        if before is not None:
            self._turn_of[tenant] = turn
            self.turns[turn] = self.turns.pop(before)

    def tasks_before(self, tenant: str, order: TaskOrder) -> int:
        turn = self._turn_of.get(tenant)
        return 0 if turn is None else int(self.turns[turn].bisect_left(order))


class WaitingTasks:
    """Counts tasks that wait. The oldest is first in `tasks`, which has them by number."""

    def __init__(self) -> None:
        self.tasks: OrderedDict[int, QueuedTask] = OrderedDict()
        self.tokens = 0
        self.missing_tokens = 0

    @property
    def oldest_age_s(self) -> float:
        """How long the oldest task has waited; 0 without tasks."""
        oldest = next(iter(self.tasks.values()), None)
        return time.monotonic() - oldest.queued_s if oldest is not None else 0.0

    def add(self, queued: QueuedTask) -> None:
        """Counts a task that waits from now on."""
        self.tasks[queued.number] = queued
        if queued.at_front:
            # These tasks have waited longest, or nearly so.
            self.tasks.move_to_end(queued.number, last=False)
        self.tokens += queued.tokens
        self.missing_tokens += queued.missing_tokens

    def remove(self, queued: QueuedTask) -> None:
        """A task waits no more."""
        del self.tasks[queued.number]
        self.tokens -= queued.tokens
        self.missing_tokens -= queued.missing_tokens


class TenantTasks(WaitingTasks):
    """The tasks of one tenant in one class that wait. Of tenants with equal tags, the smallest `number` is next."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class ClassTasks(WaitingTasks):
    """The tasks of one class that wait: in the lanes, or for workers that have their prefix. Tenants take turns."""

    def __init__(self, tenant_weight: Callable[[str], float]) -> None:
        super().__init__()
        self.lanes = TaskLanes(self._turn)
        self._tenant_weight = tenant_weight
        self._turns = WeightedTurns(tenant_weight)
        self._tenants: dict[str, TenantTasks] = {}
        self._expected: Counter[str] = Counter()
        self._numbers = itertools.count()

    def add(self, queued: QueuedTask) -> None:
        """Counts a task that waits from now on."""
        super().add(queued)
        tenant = self._tenants.get(queued.tenant)
        if tenant is None:
            tenant = self._tenants[queued.tenant] = TenantTasks(next(self._numbers))
            self._turns.became_busy(queued.tenant)
        tenant.add(queued)

    def remove(self, queued: QueuedTask) -> None:
        """A task waits no more. It is in no lane."""
        super().remove(queued)
        tenant = self._tenants[queued.tenant]
        tenant.remove(queued)
        if not tenant.tasks:
            del self._tenants[queued.tenant]
            self._turns.became_idle(queued.tenant)

    def handed_out(self, queued: QueuedTask) -> None:
        """A task that waits no more was handed out."""
        self._turns.handed_out(queued.tenant, queued.counted_tokens)
        self._update_turn(queued.tenant)

    def corrected(self, queued: QueuedTask, tokens: int) -> None:
        """A task that was handed out took so many tokens more, or fewer if negative."""
        self._turns.corrected(queued.tenant, tokens)
        self._update_turn(queued.tenant)

    def oldest_age_of(self, tenant: str) -> float:
        """How long the oldest task of a tenant has waited; 0 without tasks."""
        tasks = self._tenants.get(tenant)
        return tasks.oldest_age_s if tasks is not None else 0.0

    def tasks_before(self, queued: QueuedTask) -> float:
        """The number of tasks of the class that are handed out before this one. An estimate."""
        tenant = self._tenants.get(queued.tenant)
        others = len(self.tasks) - (len(tenant.tasks) if tenant is not None else 0)
        own = 1 + self.lanes.tasks_before(queued.tenant, queued.order)
        return self._with_shares(queued.tenant, own, others) - 1

    def expect(self, tenant: str, tokens: int) -> None:
        """So many tokens of a tenant will soon wait, or no longer if negative."""
        self._expected[tenant] += tokens
        if not self._expected[tenant]:
            del self._expected[tenant]

    def tokens_with_expected(self, expected_share: float, tenant: str | None = None) -> float:
        """Missing tokens that wait, and this share of the expected ones. Those of one tenant, or of all."""
        if tenant is None:
            return self.missing_tokens + expected_share * self._expected.total()
        tasks = self._tenants.get(tenant)
        own = tasks.missing_tokens if tasks is not None else 0
        return own + expected_share * self._expected[tenant]

    def tokens_before_end(self, tenant: str | None, tokens: float, expected_share: float) -> float:
        """The tokens of the class that are handed out until the end of a new task of a tenant, its `tokens` included.

        None: of a task behind all others.
        """
        everything = self.tokens_with_expected(expected_share)
        if tenant is None:
            return everything + tokens
        own = self.tokens_with_expected(expected_share, tenant)
        return self._with_shares(tenant, own + tokens, everything - own)

    def position(self, queued: QueuedTask) -> tuple[Turn, TaskOrder]:
        """Tasks of the class are handed out by this, smallest first."""
        return self._turn(queued.tenant), queued.order

    def _with_shares(self, tenant: str, own: float, others: float) -> float:
        weight = self._turns.others_weight(tenant)
        return amount_ahead(own, self._tenant_weight(tenant), [(others, weight)])

    def _turn(self, tenant: str) -> Turn:
        return self._turns.start(tenant), self._tenants[tenant].number

    def _update_turn(self, tenant: str) -> None:
        if tenant in self._tenants:
            self.lanes.update_turn(tenant)


class GroupTasks:
    """The tasks of one group: those that are expected, wait or run. Classes take turns by weight."""

    def __init__(self, tenant_weight: Callable[[str], float]) -> None:
        self.expected = 0
        """The number of tasks that will be queued soon."""
        self._running = 0
        self._running_tokens = 0
        self._classes = {priority: ClassTasks(tenant_weight) for priority in Priority}
        self._turns = WeightedTurns[Priority](lambda priority: priority.weight)

    def __len__(self) -> int:
        return sum(len(one.tasks) for one in self._classes.values())

    def __iter__(self) -> Iterator[QueuedTask]:
        """Those that wait."""
        for one in self._classes.values():
            yield from one.tasks.values()

    def __contains__(self, queued: QueuedTask) -> bool:
        return queued.number in self._classes[queued.priority].tasks

    @property
    def tokens(self) -> int:
        """Prompt tokens of all tasks that wait."""
        return sum(one.tokens for one in self._classes.values())

    def of_class(self, priority: Priority) -> ClassTasks:
        """The tasks of a class that wait. `add` and `remove` add and remove them."""
        return self._classes[priority]

    def expect(self, count: int, tokens: int, priority: Priority, tenant: str) -> None:
        """So many tasks of so many tokens will soon be queued, or no longer if negative."""
        self.expected += count
        self._classes[priority].expect(tenant, count * tokens)

    def add(self, queued: QueuedTask) -> None:
        """A task waits from now on. It is in no lane yet."""
        waiting = self._classes[queued.priority]
        if not waiting.tasks:
            self._turns.became_busy(queued.priority)
        waiting.add(queued)

    def remove(self, queued: QueuedTask) -> None:
        """A task that is in no lane waits no more."""
        waiting = self._classes[queued.priority]
        waiting.remove(queued)
        if not waiting.tasks:
            self._turns.became_idle(queued.priority)

    def handed_out(self, queued: QueuedTask) -> None:
        """A worker has got a task that waits no more."""
        self._turns.handed_out(queued.priority, queued.counted_tokens)
        self._classes[queued.priority].handed_out(queued)
        self._running += 1
        self._running_tokens += queued.counted_tokens

    def ended(self, queued: QueuedTask) -> None:
        """A worker no longer has a task."""
        self._running -= 1
        self._running_tokens -= queued.counted_tokens

    def corrected(self, queued: QueuedTask, computed_tokens: int) -> None:
        """A worker has computed so many tokens of a task that was handed out."""
        tokens = computed_tokens - queued.counted_tokens
        self._turns.corrected(queued.priority, tokens)
        self._classes[queued.priority].corrected(queued, tokens)

    def first_of(self, candidates: Iterable[QueuedTask]) -> QueuedTask | None:
        """Of tasks that wait, at most one of each class, that of the class which is next."""
        return min(
            candidates,
            key=lambda queued: (self._turns.start(queued.priority), queued.priority),
            default=None,
        )

    def before(self, queued: QueuedTask) -> int:
        """The number of tasks that are handed out before this one. An estimate beside other classes and tenants."""
        priority = queued.priority
        own = self._classes[priority].tasks_before(queued)
        others = [
            (len(waiting.tasks), other.weight)
            for other, waiting in self._classes.items()
            if other is not priority
        ]
        return int(amount_ahead(own + 1, priority.weight, others)) - 1

    def tokens_ahead(
        self, priority: Priority, tenant: str | None, tokens: float, expected_share: float
    ) -> float:
        """The tokens that are handed out until the end of a new task, its own included: see ClassTasks."""
        return amount_ahead(
            self._classes[priority].tokens_before_end(tenant, tokens, expected_share),
            priority.weight,
            [
                (waiting.tokens_with_expected(expected_share), other.weight)
                for other, waiting in self._classes.items()
                if other is not priority
            ],
        )

    def mean_tokens(self) -> float:
        """Tokens to compute of the mean task that runs or waits, else of the mean expected one; 0 without any."""
        classes = self._classes.values()
        tasks = self._running + len(self)
        if tasks:
            tokens = self._running_tokens + sum(one.missing_tokens for one in classes)
            return tokens / tasks
        expected = sum(one.tokens_with_expected(1.0) for one in classes)
        return expected / self.expected if self.expected else 0.0
