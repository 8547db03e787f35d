"""The prefill queue with prefixes: which worker gets a task, how long tasks wait, and what a decision costs."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kv.layout import WorkerRef
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import QueuedTask
from headrace_router.prefill_queue.worker_stream import PrefillWorkerStream
from headrace_simulator.virtual_time import run_virtually
from tests.sim_layout import LAYOUT
from tests.unit.router.prefill_queue.test_queue import add, end, pulling, unsigned, where


async def test_the_worker_with_the_longest_prefix_and_room_gets_the_task() -> None:
    queue, (a, b, c) = pulling(3, 3, 3)
    cached = {a.ref: 100, b.ref: 300}
    assert add(queue, "x", tokens=400, cached=cached).worker == b.ref
    # Worker b then has 100 + 100 tokens to compute, worker a would have 300.
    assert add(queue, "y", tokens=400, cached=cached).worker == b.ref
    # Either would have 300 tokens to compute. Worker a is idle.
    assert add(queue, "z", tokens=400, cached=cached).worker == a.ref
    assert add(queue, "none", tokens=400).worker == c.ref


async def test_a_long_prefix_does_not_outweigh_a_busy_worker() -> None:
    queue, (busy, idle) = pulling(3, 0)
    add(queue, "x", tokens=1_000)
    queue.add_credits(idle, 3)
    assert add(queue, "y", tokens=400, cached={busy.ref: 300}).worker == idle.ref


async def test_a_task_waits_for_its_prefix_only_where_that_worker_soon_has_room() -> None:
    queue, (cached, other) = pulling(2, 0, prefix_wait_s=0.1)
    add(queue, "learned", tokens=10)
    end(queue, cached, "learned", token_s=0.001)
    # Of two tasks, the older one takes 80 ms. The wait is for as many tasks as wait already, and one.
    queue.add_credits(cached, 1)
    add(queue, "v", tokens=80)
    add(queue, "w", tokens=200)
    queue.add_credits(other, 9)
    waits = add(queue, "x", tokens=400, cached={cached.ref: 300})
    too_long = add(queue, "y", tokens=400, cached={cached.ref: 300})
    assert (where(waits), where(too_long)) == (None, other.ref)
    waits.cancel()
    # The second task begins when the first one ends.
    await asyncio.sleep(60.0)
    end(queue, cached, "v")
    assert where(add(queue, "z", tokens=400, cached={cached.ref: 300})) == other.ref


async def test_an_affinity_wait_ends_when_the_worker_leaves_or_the_task_is_cancelled() -> None:
    queue, (a, b) = pulling(2, 0, prefix_wait_s=30.0)
    add(queue, "w", tokens=10)
    add(queue, "x", tokens=10)
    queue.add_credits(b, 1)
    cancelled, kept = (add(queue, name, tokens=400, cached={a.ref: 300}) for name in "yz")
    assert (cancelled.worker, kept.worker) == (None, None)
    cancelled.cancel()
    queue.remove_worker(a)
    assert kept.worker == b.ref
    assert queue.depth == 0
    assert queue.queued_tokens == 0


async def test_the_estimate_follows_from_what_workers_have_learned() -> None:
    queue, (a, b) = pulling(1, 1)
    assert queue.wait_s() == 0.0
    for name in ("x", "y"):
        add(queue, name, tokens=1_000)
    end(queue, a, "x", token_s=0.001)
    end(queue, b, "y", token_s=0.003)
    queue.add_credits(a, 1)
    queue.add_credits(b, 1)
    for index in range(12):
        # What a worker has of a prompt, it does not compute.
        cached = {a.ref: 1_000} if index % 2 else {}
        add(queue, f"t{index}", tokens=2_000 if cached else 1_000, cached=cached)
    assert (queue.depth, queue.queued_tokens) == (10, 15_000)
    # The mean of two workers computes 1,000 tokens in 2 s. A new task has to wait for 11 tasks.
    assert queue.wait_s() == pytest.approx(11.0, rel=0.05)
    assert sum(queue.depths("sim").values()) == 10
    assert sum(queue.depths("another").values()) == 0
    oldest = next(iter(queue._groups[a.group_key].tasks))
    oldest.queued_s -= 40
    # A longer wait shows that the workers have become slow.
    assert queue.wait_s() == pytest.approx(40.0, abs=1.0)
    assert max(queue.oldest_ages_s().values()) == pytest.approx(40.0, abs=1.0)


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
    """Drives a queue, and records beside it which tasks and workers there are."""

    def __init__(self) -> None:
        self.queue = PrefillQueue(1_000, prefix_wait_s=60.0, sign=unsigned)
        self.streams: dict[str, PrefillWorkerStream] = {}
        self.tasks: list[QueuedTask] = []
        self.joins = 0
        for name in _NAMES:
            self.join(name)

    def join(self, name: str) -> None:
        self.joins += 1
        ref = WorkerRef(name, f"i{self.joins}")
        self.streams[name] = self.queue.add_worker(ref, "sim", LAYOUT)

    def step(self, kind: str, number: int, what: object) -> None:
        if kind == "add":
            assert isinstance(what, set)
            refs = [self.streams[name].ref for name in what]
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
                tenant=f"tenant-{number % 3}",
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
        stream = self.streams[name]
        running = list(stream.tasks)
        if kind == "credit":
            self.queue.add_credits(stream, number)
        elif kind == "leave":
            self.queue.remove_worker(stream)
            self.join(name)
        elif number < len(running) and kind == "finish":
            end(self.queue, stream, running[number])
        elif number < len(running):
            self.queue.task_started(stream, running[number])

    def check(self) -> None:
        running = {id(task) for stream in self.streams.values() for task in stream.tasks.values()}
        waiting = [task for task in self.tasks if not task.outcome.done() and task.worker is None]
        assert self.queue.depth == len(waiting)
        assert self.queue.queued_tokens == 100 * len(waiting)
        for task in self.tasks:
            if not task.outcome.done():
                # Every task waits, or exactly the worker that it names has it.
                assert (task.worker is None) != (id(task) in running)
                assert task.worker is None or task.worker not in task.avoid
        for stream in self.streams.values():
            assert stream.load_tokens == sum(
                task.tokens - task.cached_tokens(stream.ref) for task in stream.tasks.values()
            )
            if stream.credits:
                # A credit is left only when no waiting task may use it, or each waits for its prefix.
                affinity_waits = self.queue._groups[stream.group_key]._affinity_waits
                assert all(
                    stream.ref in task.avoid
                    or task in affinity_waits
                    or not stream.may_take(task.tenant)
                    for task in waiting
                )


@settings(max_examples=150, deadline=None)
@given(steps=_STEPS)
def test_no_task_is_lost_or_doubled_and_no_credit_is_wasted(
    steps: list[tuple[str, int, object]],
) -> None:
    async def drive() -> None:
        model = _Model()
        for step in steps:
            model.step(*step)
            model.check()

    run_virtually(drive)
