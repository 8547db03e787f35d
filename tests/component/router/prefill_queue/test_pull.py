"""The prefill queue over real gRPC."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import DuplicateTransfer, ProtocolViolation, WorkerGone
from headrace_common.rpc.status import error_from_rpc
from headrace_kv.layout.layout import WorkerRef
from headrace_router.prefill_queue.task import QueuedTask, TaskTerms
from headrace_router.prefill_queue.worker_stream import CREDITS_MAX
from tests.component.router.fakes import LAYOUT, FakePrefill, Rig, fail, hand_over, stall
from tests.waiting import until


def _enqueue(rig: Rig, name: str, deadline_s: float = 1.0) -> QueuedTask:
    return rig.router.queue.enqueue(
        prefill_pb2.PrefillTask(transfer_id=name),
        layout=LAYOUT,
        terms=TaskTerms(deadline_s, returns_max=1),
    )


def _names(worker: FakePrefill) -> list[str]:
    return [task.transfer_id for task in worker.tasks]


async def test_tasks_are_sent_in_order_one_per_credit_and_their_outcome_is_returned(
    rig: Rig,
) -> None:
    worker = await rig.add_prefill(hand_over, credit=0)
    tasks = [_enqueue(rig, name, at) for name, at in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
    await worker.give_credit(1)
    for task in tasks:
        async with asyncio.timeout(5):
            outcome = await task.outcome
        assert outcome.error is None
    assert _names(worker) == ["b", "c", "a"]


async def test_a_worker_with_another_layout_gets_no_task(rig: Rig) -> None:
    foreign = await rig.add_prefill(stall, layout=replace(LAYOUT, model="other"))
    with pytest.raises(WorkerGone):
        _enqueue(rig, "a")
    assert not foreign.tasks
    assert foreign.error is None


async def test_a_failed_task_has_the_error_of_its_reason(rig: Rig) -> None:
    await rig.add_prefill(fail("DEADLINE_EXCEEDED"))
    async with asyncio.timeout(5):
        error = (await _enqueue(rig, "a").outcome).error
    assert error is not None
    assert (error.reason, error.detail) == ("DEADLINE_EXCEEDED", "as scripted")


async def test_open_tasks_of_a_dead_worker_fail_and_waiting_ones_go_to_another(
    rig: Rig,
) -> None:
    dying = await rig.add_prefill(stall, credit=1)
    running = _enqueue(rig, "a")
    await until(lambda: _names(dying) == ["a"])
    await dying.started("a")
    await until(lambda: running.has_started)
    waiting = _enqueue(rig, "b")
    other = await rig.add_prefill(hand_over, credit=0)
    await dying.die()
    async with asyncio.timeout(1):
        error = (await running.outcome).error
    assert isinstance(error, WorkerGone)
    assert error.metadata["worker_id"] == "p0"
    assert not waiting.outcome.done()
    await other.give_credit(1)
    async with asyncio.timeout(5):
        assert (await waiting.outcome).error is None
    assert rig.pulling() == {"p1"}


async def test_cancelling_a_task_stops_it_on_its_worker(rig: Rig) -> None:
    worker = await rig.add_prefill(stall, credit=1)
    running, waiting = _enqueue(rig, "a"), _enqueue(rig, "b")
    await until(lambda: _names(worker) == ["a"])
    waiting.cancel()
    running.cancel()
    await until(lambda: worker.cancels == ["a"], 1.0)
    await worker.done("a", "CANCELLED", "as asked")
    await worker.give_credit(1)
    _enqueue(rig, "c")
    await until(lambda: _names(worker) == ["a", "c"])


async def test_one_incarnation_has_one_pull_stream(rig: Rig) -> None:
    first = await rig.add_prefill(stall)
    second = FakePrefill("p0", rig.handoff, stall)
    second.incarnation = first.incarnation
    await second.start(rig.endpoint, credit=0)
    async with asyncio.timeout(5):
        await second.ended.wait()
    assert second.error is not None
    assert second.error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert isinstance(error_from_rpc(second.error), DuplicateTransfer)
    await second.close()
    assert set(rig.router.queue.pulling_workers().values()) == {
        frozenset({WorkerRef("p0", first.incarnation)})
    }
    assert first.error is None


@pytest.mark.parametrize(
    "request_,words",
    [
        (prefill_pb2.PullRequest(), "Credit, TaskStarted, FirstToken or TaskDone"),
        (
            prefill_pb2.PullRequest(hello=prefill_pb2.Hello()),
            "Credit, TaskStarted, FirstToken or TaskDone",
        ),
        (
            prefill_pb2.PullRequest(credit=prefill_pb2.Credit(task_count=CREDITS_MAX + 1)),
            "more than",
        ),
    ],
)
async def test_a_protocol_violation_ends_only_that_workers_stream(
    rig: Rig, request_: prefill_pb2.PullRequest, words: str
) -> None:
    faulty, other = await rig.add_prefill(stall, credit=0), await rig.add_prefill(hand_over)
    await faulty.send(request_)
    async with asyncio.timeout(5):
        await faulty.ended.wait()
    assert faulty.error is not None
    error = error_from_rpc(faulty.error)
    assert isinstance(error, ProtocolViolation)
    assert words in error.detail
    async with asyncio.timeout(5):
        assert (await _enqueue(rig, "a").outcome).error is None
    assert other.error is None


@pytest.mark.parametrize(
    "first",
    [
        prefill_pb2.PullRequest(credit=prefill_pb2.Credit(task_count=1)),
        prefill_pb2.PullRequest(hello=prefill_pb2.Hello(worker_id="p0", incarnation="i")),
    ],
)
async def test_a_stream_must_begin_with_a_complete_hello(
    rig: Rig, first: prefill_pb2.PullRequest
) -> None:
    worker = FakePrefill("p0", rig.handoff, stall)
    worker.hello = first
    await worker.start(rig.endpoint, credit=0)
    async with asyncio.timeout(5):
        await worker.ended.wait()
    assert worker.error is not None
    assert worker.error.code() is grpc.StatusCode.FAILED_PRECONDITION
    await worker.close()
