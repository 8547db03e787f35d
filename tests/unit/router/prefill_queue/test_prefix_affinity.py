"""The prefill queue with prefixes: who gets a task, how long it waits for whom, and what it costs to decide."""

from __future__ import annotations

import asyncio
import sys
import time
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kv.layout.layout import WorkerRef
from headrace_router.prefill_queue.estimate import ThroughputEstimator
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import PrefillWorkerStream, QueuedTask
from tests.unit.router.prefill_queue.test_queue import LAYOUT, add, end, join, sent, where


async def test_the_worker_with_the_longest_prefix_and_room_gets_the_task() -> None:
    queue = PrefillQueue(10)
    a, b, c = (join(queue, name) for name in "abc")
    for puller in (a, b, c):
        queue.add_credits(puller, 3)
    cached = {a.ref: 100, b.ref: 300}
    assert add(queue, "x", tokens=400, cached=cached).worker == b.ref
    # There 100 + 100 tokens are to be computed then, and 300 on a.
    assert add(queue, "y", tokens=400, cached=cached).worker == b.ref
    # Now it is 300 on either, and a has nothing to do yet.
    assert add(queue, "z", tokens=400, cached=cached).worker == a.ref
    assert add(queue, "none", tokens=400).worker == c.ref


async def test_a_long_prefix_does_not_outweigh_a_busy_worker() -> None:
    queue = PrefillQueue(10)
    busy, idle = join(queue, "a"), join(queue, "b")
    queue.add_credits(busy, 3)
    add(queue, "x", tokens=1_000)
    queue.add_credits(idle, 3)
    assert add(queue, "y", tokens=400, cached={busy.ref: 300}).worker == idle.ref


async def test_it_waits_for_a_worker_that_soon_has_room_and_goes_there() -> None:
    queue = PrefillQueue(10, prefix_wait_s=5.0)
    a, b = join(queue, "a"), join(queue, "b")
    queue.add_credits(a, 1)
    add(queue, "x", tokens=10)
    queue.add_credits(b, 1)
    task = add(queue, "y", tokens=400, cached={a.ref: 300})
    assert where(task) is None
    assert queue.depth == 1
    # Nobody is held up by it.
    assert add(queue, "z", tokens=10).worker == b.ref
    end(queue, a, "x")
    queue.add_credits(a, 1)
    assert where(task) == a.ref
    assert queue.depth == 0


async def test_it_waits_no_longer_than_it_may_and_only_once() -> None:
    queue = PrefillQueue(10, prefix_wait_s=0.05)
    a, b = join(queue, "a"), join(queue, "b")
    queue.add_credits(a, 1)
    add(queue, "x", tokens=10)
    queue.add_credits(b, 1)
    started_s = time.monotonic()
    task = add(queue, "y", tokens=400, cached={a.ref: 300})
    while task.worker is None:
        assert time.monotonic() < started_s + 5
        await asyncio.sleep(0.005)
    assert task.worker == b.ref
    assert time.monotonic() - started_s >= 0.05
    late = add(queue, "late", tokens=400, cached={a.ref: 300})
    queue.leave(b)
    end(queue, a, "x")
    queue.add_credits(a, 1)
    assert late.worker == a.ref


@pytest.mark.parametrize("reason", ["too little", "not soon", "gone", "too many"])
async def test_it_does_not_wait_in_vain(reason: str) -> None:
    queue = PrefillQueue(10, prefix_wait_s=0.05)
    a, b = join(queue, "a"), join(queue, "b")
    queue.add_credits(a, 2)
    if reason == "not soon":
        # Tasks take far longer than may be waited.
        first = add(queue, "w", tokens=10)
        first.pulled_s -= 100
        end(queue, a, "w")
    else:
        queue.add_credits(a, -1)
    add(queue, "x", tokens=10)
    queue.add_credits(b, 1)
    cached = {a.ref: 50 if reason == "too little" else 300}
    if reason == "too many":
        assert add(queue, "hopes", tokens=400, cached=cached).worker is None
    elif reason == "gone":
        queue.leave(a)
    task = add(queue, "y", tokens=400, cached=cached)
    assert task.worker == b.ref


async def test_when_the_hoped_for_worker_leaves_or_the_task_is_given_up_nothing_is_left() -> None:
    queue = PrefillQueue(10, prefix_wait_s=30.0)
    a, b = join(queue, "a"), join(queue, "b")
    queue.add_credits(a, 2)
    add(queue, "w", tokens=10)
    add(queue, "x", tokens=10)
    queue.add_credits(b, 1)
    given_up, kept = (add(queue, name, tokens=400, cached={a.ref: 300}) for name in "yz")
    assert (given_up.worker, kept.worker) == (None, None)
    given_up.cancel()
    queue.leave(a)
    assert kept.worker == b.ref
    assert queue.depth == 0
    assert queue.estimate().queued_tokens == 0


async def test_the_estimate_follows_from_what_ended() -> None:
    queue = PrefillQueue(100)
    a, b = join(queue, "a"), join(queue, "b")
    queue.add_credits(a, 1)
    queue.add_credits(b, 1)
    assert queue.estimate().wait_s == 0.0
    for name in ("x", "y"):
        add(queue, name, tokens=1_000).pulled_s -= 2.0
    end(queue, a, "x")
    end(queue, b, "y")
    queue.add_credits(a, 1)
    queue.add_credits(b, 1)
    for index in range(12):
        add(queue, f"t{index}", tokens=1_000)
    estimate = queue.estimate()
    assert (estimate.depth, estimate.queued_tokens) == (10, 10_000)
    # Two workers do 1,000 tokens in 2 s each: 11 tasks' worth until a new one has its place.
    assert estimate.wait_s == pytest.approx(11.0, rel=0.05)
    assert queue.estimate("sim").depth == 10
    assert queue.estimate("another").depth == 0
    oldest = next(iter(queue._groups[a.group_key]))
    oldest.queued_s -= 40
    # What has waited longer than that says that the workers have become slow.
    assert queue.estimate().wait_s == pytest.approx(40.0, abs=1.0)
    assert queue.estimate().oldest_age_s == pytest.approx(40.0, abs=1.0)


def test_the_pace_forgets() -> None:
    pace = ThroughputEstimator()
    assert (pace.task_duration_s, pace.wait_s(100, 1)) == (0.0, 0.0)
    pace.note(100, 1.0, 0.0)
    assert pace.task_duration_s == pytest.approx(1.0)
    assert pace.wait_s(100, 1) == pytest.approx(2.0)
    pace.note(100, 10.0, 300.0)
    assert pace.task_duration_s == pytest.approx(10.0, rel=0.01)
    assert pace.wait_s(0, 0) == 0.0


_NAMES = ("a", "b", "c")
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 5), st.sets(st.sampled_from(_NAMES))),
        st.tuples(st.just("credit"), st.integers(0, 2), st.sampled_from(_NAMES)),
        st.tuples(st.just("finish"), st.integers(0, 9), st.sampled_from(_NAMES)),
        st.tuples(st.just("start"), st.integers(0, 9), st.sampled_from(_NAMES)),
        st.tuples(st.just("leave"), st.just(0), st.sampled_from(_NAMES)),
        st.tuples(st.just("cancel"), st.integers(0, 9), st.just("")),
    ),
    max_size=60,
)


class _Model:
    """Drives a queue and keeps its books beside it."""

    def __init__(self) -> None:
        self.queue = PrefillQueue(1_000, prefix_wait_s=60.0)
        self.pullers: dict[str, PrefillWorkerStream] = {}
        self.tasks: list[QueuedTask] = []
        self.joins = 0
        for name in _NAMES:
            self.join(name)

    def join(self, name: str) -> None:
        self.joins += 1
        ref = WorkerRef(name, f"i{self.joins}")
        self.pullers[name] = self.queue.join(ref, "sim", LAYOUT)

    def step(self, kind: str, number: int, what: object) -> None:
        if kind == "add":
            assert isinstance(what, set)
            refs = [self.pullers[name].ref for name in what]
            terms = (
                {"cached": dict.fromkeys(refs, 90)}
                if number % 2
                else {"avoid": frozenset(refs[:2])}
            )
            task = add(
                self.queue,
                f"t{len(self.tasks)}",
                float(number),
                tokens=100,
                returns_max=1,
                **terms,
            )
            self.tasks.append(task)
        elif kind == "cancel":
            if number < len(self.tasks):
                self.tasks[number].cancel()
        else:
            assert isinstance(what, str)
            self._worker_step(kind, number, what)

    def _worker_step(self, kind: str, number: int, name: str) -> None:
        puller = self.pullers[name]
        running = list(puller.tasks)
        if kind == "credit":
            self.queue.add_credits(puller, number)
        elif kind == "leave":
            self.queue.leave(puller)
            self.join(name)
        elif number < len(running) and kind == "finish":
            end(self.queue, puller, running[number])
        elif number < len(running):
            self.queue.start(puller, running[number])

    def check(self) -> None:
        running = {id(task) for puller in self.pullers.values() for task in puller.tasks.values()}
        waiting = [task for task in self.tasks if not task.outcome.done() and task.worker is None]
        assert self.queue.depth == len(waiting)
        assert self.queue.estimate().queued_tokens == 100 * len(waiting)
        for task in self.tasks:
            if not task.outcome.done():
                # Every task is waiting or with exactly the worker that it names, which it does not avoid.
                assert (task.worker is None) != (id(task) in running)
                assert task.worker is None or task.worker not in task.avoid
        for puller in self.pullers.values():
            assert puller.load_tokens == sum(
                task.tokens - task.cached_tokens(puller.ref) for task in puller.tasks.values()
            )
            if puller.credits:
                # Room is left only where nothing that waits may go, but for what hopes for another.
                assert all(puller.ref in task.avoid or task.waits_for for task in waiting)


@settings(max_examples=150, deadline=None)
@given(steps=_STEPS)
def test_no_task_is_lost_or_doubled_and_no_room_is_wasted(
    steps: list[tuple[str, int, object]],
) -> None:
    async def drive() -> None:
        model = _Model()
        for step in steps:
            model.step(*step)
            model.check()

    asyncio.run(drive())


async def _lines_per_task(count: int, workers: int) -> float:
    """Lines of Python that `count` tasks take from queue to end, which no load of the machine changes."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    queue = PrefillQueue(count)
    pullers = [join(queue, f"p{number}") for number in range(workers)]
    refs = [puller.ref for puller in pullers]
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for number in range(count):
            first = number % (workers - 8)
            cached = {ref: 64 * (1 + index) for index, ref in enumerate(refs[first : first + 8])}
            add(queue, f"t{number}", float(number % 97), tokens=1_000, cached=cached)
        while queue.depth:
            for puller in pullers:
                queue.add_credits(puller, 1)
                for name in sent(puller):
                    end(queue, puller, name)
            await asyncio.sleep(0)
    finally:
        sys.settrace(before)
    return lines / count


async def test_what_a_task_costs_hardly_grows_with_tasks_and_workers() -> None:
    few = await _lines_per_task(count=200, workers=30)
    # A scan of all tasks or of all workers for each would take five to ten times as many.
    assert await _lines_per_task(count=2_000, workers=30) < 2 * few
    assert await _lines_per_task(count=2_000, workers=300) < 2 * few
