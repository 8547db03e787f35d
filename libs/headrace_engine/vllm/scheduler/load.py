"""What a scheduler's hooks show of its load and its steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Mapping
from itertools import count
from typing import TYPE_CHECKING, Final

from headrace_common.time_model.model import StepTimes
from headrace_engine.receipts import RequestCost, StepColumns
from headrace_engine.steps import EngineSteps, StepMeter
from headrace_engine.vllm.link.messages import EngineLoad
from headrace_kv.tiers.promises import NO_PROMISES, PromiseCounts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


REPORT_S: Final = 0.05
_POLLS_PER_STEPS: Final = 5
_POLLS_PER_SECOND: Final = 20


class LoadMeter:
    """Follows requests and steps by the scheduler's hooks, on the scheduling thread. Any thread may read."""

    def __init__(self, count_promises: Callable[[], PromiseCounts] = lambda: NO_PROMISES) -> None:
        self._meter = StepMeter()
        self._known: set[str] = set()
        self._running: set[str] = set()
        self._count_blocks: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._count_promises = count_promises

    def bind(self, count_blocks: Callable[[], tuple[int, int]]) -> None:
        """`count_blocks` reads vLLM's (used, total) blocks."""
        self._count_blocks = count_blocks

    def request_added(self, request_id: str) -> None:
        """The scheduler has a new request."""
        self._known.add(request_id)
        self._meter.costs.request_added(request_id)
        self._meter.request_added()

    def step_planned(
        self, output: SchedulerOutput, sending: Container[str] = (), *, waits: bool = False
    ) -> None:
        """A step is planned. One of its requests may have been preempted before.

        `sending`: see as_step. `waits`: see StepMeter.
        """
        self._running.difference_update(output.preempted_req_ids or ())
        self._running.update(output.num_scheduled_tokens)
        continues = bool(output.scheduled_cached_reqs.req_ids)
        columns = columns_of(output)
        step, known = columns.as_step(sending), len(self._known)
        self._meter.planned(step, known, continues=continues, columns=columns, waits=waits)

    def step_ended(self) -> None:
        """The results of the oldest planned step are handled."""
        self._meter.ended()

    def request_finished(
        self, request_id: str, *, by_step: bool = True, billed: bool = True
    ) -> RequestCost:
        """A request has ended, `by_step`: by the results of the oldest planned step. `billed`: it gets a receipt."""
        if by_step:
            self._meter.book()
        costs = self._meter.costs
        cost = costs.bill(request_id) if billed else RequestCost()
        costs.drop(request_id)
        self._known.discard(request_id)
        self._running.discard(request_id)
        if not self._known:
            self._meter.idle()
        return cost

    @property
    def steps(self) -> EngineSteps:
        """The steps until now."""
        return self._meter.steps

    @property
    def step_times(self) -> StepTimes:
        """What the steps have shown."""
        return self._meter.times

    def read(self) -> EngineLoad:
        """The current load."""
        used, total = self._count_blocks()
        running = len(self._running)
        waiting = max(0, len(self._known) - running)
        return EngineLoad(running, waiting, used, total, self.step_times, self._count_promises())


def columns_of(output: SchedulerOutput) -> StepColumns:
    """The requests of a step. One with one token beside its drafts counts as an answer."""
    cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
    request_ids = [*cached.req_ids, *(request.req_id for request in new)]
    contexts = [*cached.num_computed_tokens, *(request.num_computed_tokens for request in new)]
    added, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    if output.total_num_scheduled_tokens == len(added):
        return StepColumns(request_ids, contexts)
    parts = [
        (one, context, added[one] - len(drafts.get(one, ())))
        for one, context in zip(request_ids, contexts, strict=True)
    ]
    return StepColumns(
        [one for one, _, count in parts if count <= 1],
        [context for _, context, count in parts if count <= 1],
        [part for part in parts if part[2] > 1],
    )


async def report_changes(
    meter: LoadMeter,
    send: Callable[[EngineLoad], None],
    send_steps: Callable[[EngineSteps], None] = lambda steps: None,
) -> None:
    """Sends the load at the start and after each change. Polls every `REPORT_S`: no hook follows a block's return.

    Sends the steps every 0.25 s if there were any, and else every second.
    """
    last: EngineLoad | None = None
    last_steps: EngineSteps | None = None
    for poll in count():
        load, steps = meter.read(), meter.steps
        if load != last:
            send(load)
            last = load
        if poll % _POLLS_PER_SECOND == 0 or (poll % _POLLS_PER_STEPS == 0 and steps != last_steps):
            send_steps(steps)
            last_steps = steps
        await asyncio.sleep(REPORT_S)


class StepStarts:
    """Reports each named request once, when its first step was planned. The scheduling thread calls all methods."""

    def __init__(self, on_start: Callable[[str, int], None]) -> None:
        """`on_start` gets the name and nanoseconds of the host's monotonic clock."""
        self._on_start = on_start
        self._names: dict[str, str] = {}

    def request_added(self, request_id: str, name: str) -> None:
        """The scheduler has a new request. One with an empty name is not reported."""
        if name:
            self._names[request_id] = name

    def step_planned(self, scheduled: Mapping[str, int]) -> None:
        """A step is about to begin. `scheduled` has its requests, with their tokens."""
        if not self._names:
            return
        started = self._names.keys() & scheduled.keys()
        if not started:
            return
        now_ns = time.monotonic_ns()
        for request_id in started:
            self._on_start(self._names.pop(request_id), now_ns)

    def request_finished(self, request_id: str) -> None:
        """The request has ended, perhaps before its first step."""
        self._names.pop(request_id, None)
