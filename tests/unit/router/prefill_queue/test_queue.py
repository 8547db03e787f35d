"""The prefill queue's rules: order, credits, layouts, cancellation, loss of workers, bounds."""

from __future__ import annotations

import itertools
import math
from contextlib import ExitStack
from dataclasses import replace

import pytest

from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import (
    Draining,
    DuplicateTransfer,
    InvalidRequest,
    ProtocolViolation,
    QueueFull,
    TransferFailed,
    WorkerGone,
)
from headrace_common.registry.adapters import Adapter, adapter_to_proto
from headrace_common.time_model.model import StepTimes, TimeModel, time_model_to_proto
from headrace_kv.compatibility import fingerprint
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import QueuedTask, TaskTerms
from headrace_router.prefill_queue.worker_stream import CREDITS_MAX, PrefillWorkerStream
from tests.sim_layout import LAYOUT


def unsigned(task: prefill_pb2.PrefillTask, prefill: WorkerRef, layout_hash: bytes) -> bytes:
    """A queue's sign function, for tests that do not look at tickets."""
    return b""


def join(queue: PrefillQueue, name: str = "p0", layout: KvLayout = LAYOUT) -> PrefillWorkerStream:
    return queue.add_worker(WorkerRef(name, "i0"), "sim", layout)


def pulling(
    *credit_counts: int, limit: int = 100, prefix_wait_s: float = 0.05
) -> tuple[PrefillQueue, list[PrefillWorkerStream]]:
    """A queue, and workers p0, p1 and so on with these numbers of credits."""
    queue = PrefillQueue(limit, prefix_wait_s=prefix_wait_s, sign=unsigned)
    streams = [join(queue, f"p{number}") for number in range(len(credit_counts))]
    for stream, count in zip(streams, credit_counts, strict=True):
        queue.add_credits(stream, count)
    return queue, streams


def add(
    queue: PrefillQueue,
    name: str,
    deadline_s: float = 100.0,
    layout: KvLayout = LAYOUT,
    tokens: int = 0,
    **terms: object,
) -> QueuedTask:
    task = prefill_pb2.PrefillTask(transfer_id=name, token_ids=range(tokens))
    given = TaskTerms(deadline_s, **terms)  # type: ignore[arg-type]
    return queue.enqueue(task, layout=layout, terms=given)


def where(queued: QueuedTask) -> WorkerRef | None:
    """The worker that has the task now. A call, because mypy remembers a compared attribute."""
    return queued.worker


def sent(stream: PrefillWorkerStream) -> list[str]:
    messages = [stream.outbox.get_nowait() for _ in range(stream.outbox.qsize())]
    return [
        f"cancel {message.cancel.transfer_id}"
        if message.HasField("cancel")
        else message.task.transfer_id
        for message in messages
    ]


def end(
    queue: PrefillQueue,
    stream: PrefillWorkerStream,
    name: str,
    reason: str = "",
    detail: str = "",
    token_s: float = 0.0,
) -> None:
    """Ends a task. With `token_s`, its worker has learned that it computes a token in so many seconds."""
    done = prefill_pb2.TaskDone(transfer_id=name, reason=reason, detail=detail)
    if token_s:
        steps = StepTimes(s_per_prompt_token=token_s, prompt_steps=9)
        done.time_model.CopyFrom(time_model_to_proto(TimeModel(steps)))
    queue.task_ended(stream, done)


async def test_tasks_go_out_by_deadline_then_arrival_one_per_credit() -> None:
    queue, (stream,) = pulling(0)
    tasks = [add(queue, name, at) for name, at in (("a", 3), ("b", 1), ("c", 2), ("d", 1))]
    assert [task.tasks_ahead for task in tasks] == [0, 0, 1, 1]
    assert sent(stream) == []
    queue.add_credits(stream, 1)
    assert sent(stream) == ["b"]
    queue.add_credits(stream, 2)
    assert sent(stream) == ["d", "c"]
    assert queue.depth == 1
    assert tasks[0].worker is None
    assert tasks[1].worker == stream.ref


async def test_of_equally_loaded_workers_the_one_with_the_oldest_last_task_is_next() -> None:
    queue, (first, second) = pulling(1, 1)
    assert add(queue, "a").worker == first.ref
    end(queue, first, "a")
    queue.add_credits(first, 1)
    assert add(queue, "b").worker == second.ref


async def test_only_matching_layouts_get_a_task_at_any_parallelism() -> None:
    queue = PrefillQueue(10, sign=unsigned)
    foreign = replace(LAYOUT, model="other")
    other = join(queue, "p0", foreign)
    wide = join(queue, "p1", replace(LAYOUT, tensor_parallel_size=2))
    queue.add_credits(other, 5)
    task = add(queue, "a")
    assert sent(other) == []
    queue.add_credits(wide, 1)
    assert task.worker == wide.ref
    assert queue.workers.pulling() == {
        fingerprint(LAYOUT): {wide.ref},
        fingerprint(foreign): {other.ref},
    }
    queue.remove_worker(other)
    assert queue.workers.pulling() == {fingerprint(LAYOUT): {wide.ref}}


async def test_avoided_workers_get_no_task_even_on_a_new_stream() -> None:
    queue, (failed, good) = pulling(5, 0)
    tasks = [add(queue, "a", avoid=frozenset({failed.ref}))]
    queue.remove_worker(failed)
    tasks.append(add(queue, "b", avoid=frozenset({failed.ref})))
    failed = join(queue, "p0")
    queue.add_credits(failed, 1)
    assert [task.worker for task in tasks] == [None, None]
    assert add(queue, "c", 200.0).worker == failed.ref
    queue.add_credits(good, 2)
    assert [task.worker for task in tasks] == [good.ref, good.ref]


async def test_a_task_without_an_eligible_worker_is_rejected() -> None:
    queue = PrefillQueue(10, sign=unsigned)
    with pytest.raises(WorkerGone, match="no prefill worker"):
        add(queue, "a")
    stream = join(queue)
    with pytest.raises(WorkerGone):
        add(queue, "a", avoid=frozenset({stream.ref}))
    assert queue.depth == 0


async def test_cancelling_removes_a_waiting_task_and_stops_a_running_one() -> None:
    queue, (stream,) = pulling(0)
    waiting, running = add(queue, "a", 2), add(queue, "b", 1)
    queue.add_credits(stream, 1)
    waiting.cancel()
    running.cancel()
    running.cancel()
    assert sent(stream) == ["b", "cancel b"]
    assert queue.depth == 0
    queue.add_credits(stream, 1)
    assert sent(stream) == []
    end(queue, stream, "b", "CANCELLED")
    assert not stream.tasks
    queue.remove_worker(stream)
    running.cancel()
    waiting.cancel()


async def test_the_outcome_of_a_task_is_the_report_of_its_worker() -> None:
    queue, (stream,) = pulling(3)
    good, bad, invalid = add(queue, "a"), add(queue, "b"), add(queue, "c")
    reports: list[prefill_pb2.TaskDone] = []
    good.report_end(reports.append)
    queue.task_ended(stream, prefill_pb2.TaskDone(transfer_id="a", payload_bytes=7))
    end(queue, stream, "b", "TRANSFER_FAILED", "refused")
    end(queue, stream, "unknown")
    queue.task_started(stream, "unknown")
    assert await good.outcome is None
    assert [one.payload_bytes for one in reports] == [7]
    error = await bad.outcome
    assert isinstance(error, TransferFailed)
    assert error.detail == "refused"
    end(queue, stream, "c", "INVALID_FIELD", "too long")
    error = await invalid.outcome
    assert isinstance(error, InvalidRequest)
    assert error.violations == {"prompt": "too long"}


async def test_a_lost_worker_fails_its_open_tasks_and_those_that_only_it_could_take() -> None:
    queue, (lost, other) = pulling(1, 0)
    running, waiting = add(queue, "a", 1, returns_max=2), add(queue, "b", 2)
    picky = add(queue, "c", 3, avoid=frozenset({other.ref}))
    queue.task_started(lost, "a")
    queue.remove_worker(lost)
    error = await running.outcome
    assert error is not None
    assert "vanished with task a" in error.detail
    assert error.metadata["worker_id"] == "p0"
    assert isinstance(await picky.outcome, WorkerGone)
    assert not waiting.outcome.done()
    assert queue.depth == 1
    queue.remove_worker(other)
    assert isinstance(await waiting.outcome, WorkerGone)


async def test_unopened_tasks_of_a_lost_worker_go_to_the_front_under_the_same_transfer() -> None:
    queue, (lost, other) = pulling(10, 0)
    held = [add(queue, f"t{i}", 50.0 + i, returns_max=1) for i in range(10)]
    urgent = add(queue, "urgent", 1.0)
    held[3].cancel()
    queue.task_started(lost, "t0")
    for task in held:
        task.queued_s -= 40
    queue.remove_worker(lost)
    assert max(queue.oldest_ages_s().values()) == pytest.approx(40.0, abs=1.0)
    assert isinstance(await held[0].outcome, WorkerGone)
    queue.add_credits(other, 20)
    assert sent(other) == [f"t{i}" for i in (1, 2, 4, 5, 6, 7, 8, 9)] + ["urgent"]
    for task in (*held, urgent):
        if task not in (held[0], held[3]):
            end(queue, other, task.task.transfer_id)
            assert await task.outcome is None


async def test_a_task_is_returned_at_most_returns_max_times() -> None:
    queue, workers = pulling(1, 0, 0, 0)
    task = add(queue, "a", returns_max=2)
    for worker, following in itertools.pairwise(workers):
        assert task.worker == worker.ref
        queue.remove_worker(worker)
        if following is not workers[3]:
            queue.add_credits(following, 1)
    assert "vanished" in str(await task.outcome)


async def test_front_tasks_go_before_the_others() -> None:
    queue, (stream,) = pulling(0)
    for name, at, front in (("a", 1.0, False), ("c", 9.0, True), ("b", 8.0, True)):
        add(queue, name, at, front=front)
    queue.add_credits(stream, 3)
    assert sent(stream) == ["b", "c", "a"]


async def test_a_draining_worker_returns_rejected_tasks_and_gets_no_more() -> None:
    queue, (draining, other) = pulling(5, 0)
    refused, running = add(queue, "a", returns_max=1), add(queue, "b", returns_max=1)
    queue.task_started(draining, "b")
    end(queue, draining, "a", "DRAINING")
    assert queue.workers.pulling() == {fingerprint(LAYOUT): {other.ref}}
    queue.add_credits(draining, 1)
    assert where(refused) is None
    queue.add_credits(other, 1)
    assert where(refused) == other.ref
    # The transfer of a started task may be open.
    end(queue, draining, "b", "DRAINING", "no more")
    assert isinstance(await running.outcome, Draining)
    queue.remove_worker(draining)


async def test_a_restricted_worker_gets_only_tasks_that_no_other_worker_may_take() -> None:
    queue, (restricted, other) = pulling(5, 0)
    queue.restrict(frozenset({restricted.ref}))
    assert queue.workers.pulling() == {fingerprint(LAYOUT): {other.ref}}
    waiting = add(queue, "a", planned=restricted.ref, cached={restricted.ref: 100}, tokens=100)
    assert where(waiting) is None
    left = add(queue, "b", avoid=frozenset({other.ref}))
    assert where(left) == restricted.ref
    queue.add_credits(restricted, 1)
    assert where(waiting) is None
    queue.add_credits(other, 1)
    assert where(waiting) == other.ref
    # The roles change, and a task that waits goes to the worker that may have it now.
    later = add(queue, "c")
    assert where(later) is None
    queue.restrict(frozenset({other.ref}))
    assert where(later) == restricted.ref


async def test_tasks_are_left_to_restricted_workers_when_the_others_go() -> None:
    queue, (restricted, other) = pulling(5, 0)
    queue.restrict(frozenset({restricted.ref}))
    waiting = add(queue, "a")
    queue.remove_worker(other)
    assert where(waiting) == restricted.ref
    assert not queue.workers.pulling()
    # One that opens its stream later is restricted too.
    queue.restrict(frozenset({restricted.ref, other.ref}))
    again = join(queue, other.ref.worker_id)
    assert not queue.workers.pulling()
    queue.add_credits(again, 1)
    assert where(add(queue, "b")) is not None


async def test_a_full_worker_does_not_get_the_task_that_it_rejected() -> None:
    queue, (full, other) = pulling(2, 0)
    task = add(queue, "a", returns_max=1)
    end(queue, full, "a", "QUEUE_FULL")
    assert where(task) is None
    queue.add_credits(other, 1)
    assert where(task) == other.ref
    assert add(queue, "b").worker == full.ref


async def test_only_the_first_first_token_counts() -> None:
    queue, (stream,) = pulling(2)
    sampled = prefill_pb2.PrefillTask(transfer_id="a")
    sampled.sampling.SetInParent()
    task = queue.enqueue(sampled, layout=LAYOUT, terms=TaskTerms(100.0))
    unsampled = add(queue, "b")
    for name, token_id in (("a", 7), ("a", 8), ("b", 9)):
        first = prefill_pb2.FirstToken(transfer_id=name, token_id=token_id)
        queue.first_token_made(stream, first)
    assert (await task.first_token).token_id == 7
    assert not unsampled.first_token.done()


async def test_waiting_tasks_fail_when_the_last_worker_drains() -> None:
    queue, (draining,) = pulling(1)
    refused, waiting = add(queue, "a", returns_max=1), add(queue, "b")
    end(queue, draining, "a", "DRAINING")
    assert isinstance(await refused.outcome, WorkerGone)
    assert isinstance(await waiting.outcome, WorkerGone)
    with pytest.raises(WorkerGone):
        add(queue, "c")


async def test_expected_tasks_count_as_queued() -> None:
    queue, (stream,) = pulling(0)
    queue.add_credits(stream, 1)
    add(queue, "complete", tokens=100)
    end(queue, stream, "complete", token_s=0.1)
    queue.add_credits(stream, 1)
    with ExitStack() as expected:
        waits_s = []
        for _ in range(5):
            waits_s.append(queue.wait_s("sim"))
            expected.callback(queue.expect_task(LAYOUT, 100))
        # The first has a credit. Each of the others waits for one more task of 10 s.
        assert waits_s == pytest.approx([0.0, 10.0, 20.0, 30.0, 40.0], rel=0.05)
        assert queue.depth == 0
    assert queue.wait_s("sim") == 0.0


async def test_depth_credits_and_streams_are_bounded() -> None:
    queue, (stream,) = pulling(0, limit=2)
    add(queue, "a")
    assert queue.wait_s() < math.inf
    add(queue, "b")
    assert queue.wait_s() == math.inf
    with pytest.raises(QueueFull) as full:
        add(queue, "c")
    assert full.value.retry_after_s is not None
    assert 0 < full.value.retry_after_s <= 60
    with pytest.raises(ProtocolViolation, match=str(CREDITS_MAX)):
        queue.add_credits(stream, CREDITS_MAX + 1)
    with pytest.raises(DuplicateTransfer, match="pulls already"):
        join(queue)
    assert queue.workers.counts() == {"sim": 1}


async def test_a_task_goes_only_to_workers_with_its_adapter() -> None:
    poet, other = Adapter("poet", "aa"), Adapter("poet", "bb")
    queue = PrefillQueue(100, sign=unsigned)
    plain = join(queue, "p0")
    queue.add_credits(plain, 4)

    def asked(name: str, adapter: Adapter) -> QueuedTask:
        task = prefill_pb2.PrefillTask(transfer_id=name, adapter=adapter_to_proto(adapter))
        return queue.enqueue(task, layout=LAYOUT, terms=TaskTerms(100.0, returns_max=2))

    with pytest.raises(WorkerGone):
        asked("x0", poet)
    with_poet = queue.add_worker(WorkerRef("p1", "i0"), "sim", LAYOUT, frozenset({poet}))
    waiting = asked("x1", poet)
    assert where(waiting) is None
    # A worker that joins later without the adapter does not get it either.
    late = queue.add_worker(WorkerRef("p2", "i0"), "sim", LAYOUT, frozenset({other}))
    queue.add_credits(late, 4)
    assert where(waiting) is None
    queue.add_credits(with_poet, 1)
    assert where(waiting) == with_poet.ref
    # Nor does a worker that has joined while another one had the task.
    again = queue.add_worker(WorkerRef("p3", "i0"), "sim", LAYOUT, frozenset({poet}))
    latest = queue.add_worker(WorkerRef("p4", "i0"), "sim", LAYOUT)
    queue.add_credits(latest, 4)
    queue.remove_worker(with_poet)
    assert where(waiting) is None
    queue.add_credits(again, 1)
    assert where(waiting) == again.ref
    assert queue.workers.pulling(poet)[fingerprint(LAYOUT)] == {again.ref}
    assert queue.workers.counts_by_adapter() == {("sim", poet): 1, ("sim", other): 1}
