"""The prefill queue's rules: order, credits, layouts, cancellation, loss of workers, bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.prefill.v1 import prefill_pb2
from headrace_common.errors import (
    DuplicateTransfer,
    ProtocolViolation,
    QueueFull,
    TransferFailed,
    WorkerGone,
)
from headrace_kv.layout import KvLayout, WorkerRef
from headrace_router.prefill_queue import CREDITS_MAX, PrefillQueue, Puller, QueuedTask

_LAYOUT = KvLayout.attention(
    model="sim", dtype="float32", layer_count=4, kv_head_count=2, block_tokens=16, parts={"kv": 64}
)


def _join(queue: PrefillQueue, name: str = "p0", layout: KvLayout = _LAYOUT) -> Puller:
    return queue.join(WorkerRef(name, "i0"), "sim", layout)


def _add(
    queue: PrefillQueue,
    name: str,
    deadline_unix_s: float = 100.0,
    layout: KvLayout = _LAYOUT,
    avoid: frozenset[WorkerRef] = frozenset(),
) -> QueuedTask:
    task = prefill_pb2.PrefillTask(transfer_id=name)
    return queue.enqueue(task, layout=layout, deadline_unix_s=deadline_unix_s, avoid=avoid)


def _sent(puller: Puller) -> list[str]:
    messages = puller.outbox.take_all()
    return [
        f"cancel {message.cancel.transfer_id}"
        if message.HasField("cancel")
        else message.task.transfer_id
        for message in messages
    ]


async def test_tasks_go_out_by_deadline_then_arrival_one_per_credit() -> None:
    queue = PrefillQueue(10)
    puller = _join(queue)
    tasks = [_add(queue, name, at) for name, at in (("a", 3), ("b", 1), ("c", 2), ("d", 1))]
    assert [task.tasks_ahead for task in tasks] == [0, 0, 1, 1]
    assert _sent(puller) == []
    queue.add_credits(puller, 1)
    assert _sent(puller) == ["b"]
    queue.add_credits(puller, 2)
    assert _sent(puller) == ["d", "c"]
    assert queue.depth == 1
    assert tasks[0].worker is None
    assert tasks[1].worker == puller.ref


async def test_the_worker_with_the_most_room_gets_the_task_at_the_last_moment() -> None:
    queue = PrefillQueue(10)
    small, large = _join(queue, "p0"), _join(queue, "p1")
    queue.add_credits(small, 1)
    queue.add_credits(large, 2)
    for name in "abc":
        _add(queue, name)
    assert len(_sent(small)) == 1
    assert len(_sent(large)) == 2


async def test_only_matching_layouts_get_a_task_whatever_their_parallelism() -> None:
    queue = PrefillQueue(10)
    other = _join(queue, "p0", replace(_LAYOUT, model="other"))
    wide = _join(queue, "p1", replace(_LAYOUT, tensor_parallel_size=2))
    queue.add_credits(other, 5)
    task = _add(queue, "a")
    assert _sent(other) == []
    queue.add_credits(wide, 1)
    assert task.worker == wide.ref


async def test_avoided_workers_are_passed_over() -> None:
    queue = PrefillQueue(10)
    failed, good = _join(queue, "p0"), _join(queue, "p1")
    queue.add_credits(failed, 5)
    task = _add(queue, "a", avoid=frozenset({failed.ref}))
    assert task.worker is None
    queue.add_credits(good, 1)
    assert task.worker == good.ref


async def test_nobody_to_take_a_task_is_said_at_once() -> None:
    queue = PrefillQueue(10)
    with pytest.raises(WorkerGone, match="no prefill worker"):
        _add(queue, "a")
    puller = _join(queue)
    with pytest.raises(WorkerGone):
        _add(queue, "a", avoid=frozenset({puller.ref}))
    assert queue.depth == 0


async def test_a_cancelled_task_vanishes_and_a_running_one_is_stopped() -> None:
    queue = PrefillQueue(10)
    puller = _join(queue)
    waiting, running = _add(queue, "a", 2), _add(queue, "b", 1)
    queue.add_credits(puller, 1)
    waiting.cancel()
    running.cancel()
    running.cancel()
    assert _sent(puller) == ["b", "cancel b"]
    assert queue.depth == 0
    queue.add_credits(puller, 1)
    assert _sent(puller) == []
    queue.finish(puller, prefill_pb2.TaskDone(transfer_id="b", reason="CANCELLED"))
    assert not puller.tasks


async def test_a_finished_task_says_how_it_went() -> None:
    queue = PrefillQueue(10)
    puller = _join(queue)
    queue.add_credits(puller, 2)
    good, bad = _add(queue, "a"), _add(queue, "b")
    queue.finish(puller, prefill_pb2.TaskDone(transfer_id="a", payload_bytes=7))
    queue.finish(
        puller,
        prefill_pb2.TaskDone(transfer_id="b", reason="TRANSFER_FAILED", detail="refused"),
    )
    queue.finish(puller, prefill_pb2.TaskDone(transfer_id="unknown"))
    outcome = await good.outcome
    assert outcome.error is None
    assert outcome.done is not None
    assert outcome.done.payload_bytes == 7
    error = (await bad.outcome).error
    assert isinstance(error, TransferFailed)
    assert error.detail == "refused"


async def test_a_lost_worker_fails_its_tasks_and_those_nobody_else_can_take() -> None:
    queue = PrefillQueue(10)
    lost, other = _join(queue, "p0"), _join(queue, "p1")
    queue.add_credits(lost, 1)
    running, waiting = _add(queue, "a", 1), _add(queue, "b", 2)
    picky = _add(queue, "c", 3, avoid=frozenset({other.ref}))
    queue.leave(lost)
    assert "vanished with task a" in str((await running.outcome).error)
    assert isinstance((await picky.outcome).error, WorkerGone)
    assert not waiting.outcome.done()
    assert queue.depth == 1
    queue.leave(other)
    assert isinstance((await waiting.outcome).error, WorkerGone)


async def test_a_draining_workers_credits_are_void() -> None:
    queue = PrefillQueue(10)
    draining = _join(queue)
    queue.add_credits(draining, 5)
    refused = _add(queue, "a")
    queue.finish(draining, prefill_pb2.TaskDone(transfer_id="a", reason="DRAINING"))
    assert refused.outcome.done()
    assert _add(queue, "b").worker is None


async def test_bounds_are_kept() -> None:
    queue = PrefillQueue(2)
    puller = _join(queue)
    _add(queue, "a")
    _add(queue, "b")
    with pytest.raises(QueueFull) as full:
        _add(queue, "c")
    assert full.value.retry_after_s is not None
    with pytest.raises(ProtocolViolation, match=str(CREDITS_MAX)):
        queue.add_credits(puller, CREDITS_MAX + 1)
    with pytest.raises(DuplicateTransfer, match="pulls already"):
        _join(queue)
    assert queue.puller_counts() == {"sim": 1}
