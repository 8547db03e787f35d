"""The prefill queue over real gRPC."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from headrace.prefill.v1 import prefill_pb2
from headrace_common.callers.priority import Priority
from headrace_common.errors import DuplicateTransfer, ProtocolViolation
from headrace_common.rpc.status import error_from_rpc
from headrace_kv.layout import WorkerRef
from headrace_router.prefill_queue.task import QueuedTask, TaskTerms
from headrace_router.prefill_queue.worker_stream import CREDITS_MAX
from tests.kit.router import Rig
from tests.kit.workers import FakePrefill, hand_over, stall
from tests.sim_layout import LAYOUT
from tests.waiting import PATIENCE_S, until


def _enqueue(rig: Rig, name: str) -> QueuedTask:
    return rig.router.queue.enqueue(
        prefill_pb2.PrefillTask(transfer_id=name), layout=LAYOUT, terms=TaskTerms(1.0)
    )


def _names(worker: FakePrefill) -> list[str]:
    return [task.transfer_id for task in worker.tasks]


def batch(*requests: prefill_pb2.PullRequest) -> prefill_pb2.PullRequest:
    return prefill_pb2.PullRequest(batch=prefill_pb2.PullRequestBatch(requests=requests))


async def _end_of(worker: FakePrefill) -> grpc.aio.AioRpcError:
    """The error with which the router ended the worker's stream."""
    async with asyncio.timeout(PATIENCE_S):
        await worker.ended.wait()
    assert worker.error is not None
    return worker.error


async def test_one_incarnation_has_one_pull_stream(rig: Rig) -> None:
    first = await rig.add_prefill(stall)
    second = FakePrefill("p0", rig.handoff, stall, incarnation=first.incarnation)
    await second.start(rig.internal_endpoint, credit=0)
    error = await _end_of(second)
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert isinstance(error_from_rpc(error), DuplicateTransfer)
    await second.close()
    assert set(rig.router.queue.workers.pulling().values()) == {
        frozenset({WorkerRef("p0", first.incarnation)})
    }
    assert first.error is None


@pytest.mark.parametrize(
    "request_,words",
    [
        (prefill_pb2.PullRequest(), "FirstToken or TaskDone is expected"),
        (prefill_pb2.PullRequest(hello=prefill_pb2.Hello()), "hello where Credit, TaskStarted"),
        (
            prefill_pb2.PullRequest(credit=prefill_pb2.Credit(task_count=CREDITS_MAX + 1)),
            "more than",
        ),
        (batch(prefill_pb2.PullRequest(hello=prefill_pb2.Hello())), "hello where Credit"),
        (batch(batch()), "batch where Credit"),
    ],
)
async def test_a_protocol_violation_ends_only_that_workers_stream(
    rig: Rig, request_: prefill_pb2.PullRequest, words: str
) -> None:
    faulty, other = await rig.add_prefill(stall, credit=0), await rig.add_prefill(hand_over)
    await faulty.send(request_)
    error = error_from_rpc(await _end_of(faulty))
    assert isinstance(error, ProtocolViolation)
    assert words in error.detail
    async with asyncio.timeout(PATIENCE_S):
        assert await _enqueue(rig, "a").outcome is None
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
    await worker.start(rig.internal_endpoint, credit=0)
    assert (await _end_of(worker)).code() is grpc.StatusCode.FAILED_PRECONDITION
    await worker.close()


async def test_each_worker_that_gets_a_task_gets_a_ticket_of_its_own(rig: Rig) -> None:
    """The first worker returns the task, so the second one gets it with the same transfer id."""
    decode = WorkerRef("d0", "d" * 16)
    first = await rig.add_prefill(stall, credit=1)
    task = prefill_pb2.PrefillTask(
        transfer_id="a", decode_worker_id=decode.worker_id, decode_incarnation=decode.incarnation
    )
    terms = TaskTerms(1.0, returns_max=1, priority=Priority.LOW)
    rig.router.queue.enqueue(task, layout=LAYOUT, terms=terms)
    await until(lambda: _names(first) == ["a"])
    second = await rig.add_prefill(stall, credit=1)
    await first.done("a", "QUEUE_FULL", "no room")
    await until(lambda: _names(second) == ["a"])
    for worker in (first, second):
        (received,) = worker.tasks
        ref = WorkerRef(worker.worker_id, worker.incarnation)
        expected = rig.router_key.ticket("a", prefill=ref, decode=decode, layout=LAYOUT)
        assert received.handoff_ticket == expected
        assert Priority.from_proto(received.priority) is Priority.LOW
    assert not task.handoff_ticket
