"""When the prefill queue has two workers compute one prompt."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.deadlines import Deadline
from headrace_common.time_model.model import HandoverTimes, StepTimes, TimeModel
from headrace_kv.layout import WorkerRef
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.prefill_queue.task import QueuedTask
from headrace_router.prefill_queue.worker_stream import PrefillWorkerStream
from tests.sim_layout import LAYOUT
from tests.unit.router.prefill_queue.test_queue import add, pulling, sent

LONG = 8_000
TIMES = TimeModel(
    StepTimes(fixed_s=0.014, s_per_prompt_token=8e-5, s_per_attended_token=1.5e-9, prompt_steps=50),
    HandoverTimes(1e-3, 1e-9, 50),
)


def pair(
    step_tokens: int = 8_192, *, beside: bool = True, times: TimeModel = TIMES, credit: int = 2
) -> tuple[PrefillQueue, list[PrefillWorkerStream]]:
    """A queue with two workers, which have learned `times`."""
    queue, streams = pulling(credit, credit)
    queue.workers.update(
        registry_pb2.Member(
            worker_id=one.ref.worker_id,
            incarnation=one.ref.incarnation,
            role=registry_pb2.Member.ROLE_PREFILL,
            endpoint=f"{one.ref.worker_id}:1",
            max_num_batched_tokens=step_tokens,
            computes_beside=beside,
        )
        for one in streams
    )
    for one in streams:
        queue.report_times(one, times)
    return queue, streams


def add_long(queue: PrefillQueue, **terms: Any) -> QueuedTask:
    return add(queue, "x", tokens=LONG, **{"divide_gain": 0.15, **terms})


def part_of(queued: QueuedTask) -> int:
    """The first token that the second worker computes. 0 without one."""
    return 0 if queued.part is None else queued.part.tokens


@pytest.mark.parametrize(
    ("step_tokens", "credit", "ends"),
    [
        (8_192, 4, [4_000]),
        (4_096, 4, [4_000]),
        (2_048, 4, [2_000, 4_000, 6_000]),
        (2_048, 2, [2_000, 4_000, 6_000]),
        # No more parts than credits. The first one takes what is left.
        (2_048, 1, [6_000]),
        (1_024, 2, [4_928, 5_952, 6_976]),
        (1_024, 1, []),
    ],
)
async def test_two_workers_compute_the_steps_of_a_long_prompt_in_turn(
    step_tokens: int, credit: int, ends: list[int]
) -> None:
    queue, (first, second) = pair(step_tokens, credit=credit)
    queued = add_long(queue)
    parts = [*reversed([one.tokens for one in queued.parts])]
    assert parts == pytest.approx(ends, abs=200)
    assert not any(one % LAYOUT.block_tokens for one in parts)
    if not ends:
        return
    assert all(end - start <= step_tokens for start, end in pairwise((*parts, LONG)))
    assert {first.credits, second.credits} == {credit - (len(ends) + 1) // 2}
    tasks = {one.transfer_id: (one, by) for by in (first, second) for one in sent_tasks(by)}
    name, receiver = "x", None
    # Each receives the KV of the one before, by the ticket of that one.
    for end in (LONG, *reversed(parts)):
        task, by = tasks.pop(name)
        assert len(task.token_ids) == end
        if receiver is not None:
            assert (task.decode_worker_id, task.decode_endpoint) == (
                receiver.ref.worker_id,
                f"{receiver.ref.worker_id}:1",
            )
            assert by is not receiver
        receiver, name = by, f"{name}.prefix"
        if name in tasks:
            before, sender = tasks[name]
            assert task.first_part == prefill_pb2.FirstPart(
                worker_id=sender.ref.worker_id, incarnation="i0", end_token=len(before.token_ids)
            )
        else:
            assert not task.HasField("first_part")
    assert not tasks


async def test_parts_in_turn_gain_what_two_parts_do_not() -> None:
    for credit, parts in ((4, 3), (1, 0)):
        queue, _ = pair(2_048, credit=credit)
        assert len([*add_long(queue, divide_gain=0.38).parts]) == parts


def sent_tasks(stream: PrefillWorkerStream) -> list[prefill_pb2.PrefillTask]:
    """The tasks that a worker is sent."""
    found = []
    while not stream.outbox.empty():
        found.append(stream.outbox.get_nowait().task)
    return found


@pytest.mark.parametrize(
    ("workers", "terms"),
    [
        ({}, {"divide_gain": 0.0}),
        ({}, {"divide_gain": 0.6}),
        ({}, {"avoid": frozenset({WorkerRef("p0", "i0")})}),
        ({"beside": False}, {}),
        ({"times": TimeModel()}, {}),
    ],
    ids=["off", "gains too little", "one is excluded", "they receive nothing", "unknown times"],
)
async def test_a_prompt_is_not_divided(workers: dict[str, Any], terms: dict[str, Any]) -> None:
    queue, _ = pair(**workers)
    assert part_of(add_long(queue, **terms)) == 0


async def test_a_prompt_is_divided_only_between_idle_workers() -> None:
    queue, _ = pair()
    add(queue, "before", tokens=64)
    assert part_of(add_long(queue)) == 0


async def test_what_a_worker_has_cached_moves_the_division() -> None:
    queue, (first, _) = pair(1_024)
    queued = add_long(queue, cached={first.ref: 4_000})
    assert [one.tokens for one in queued.parts] == pytest.approx([7_000, 6_000, 5_000], abs=50)
    assert [one.worker == first.ref for one in queued.parts] == [True, False, True]


async def test_a_failed_part_ends_those_before_and_the_next_worker_computes_its_tokens() -> None:
    names = ["x.prefix.prefix.prefix", "x.prefix.prefix", "x.prefix", "x"]
    for number, fails in enumerate(names):
        queue, streams = pair(2_048)
        queued = add_long(queue)
        by = {name: one for one in streams for name in sent(one)}
        assert by.keys() == set(names)
        queue.task_started(by[fails], fails)
        queue.task_ended(by[fails], prefill_pb2.TaskDone(transfer_id=fails, reason="INTERNAL"))
        await asyncio.sleep(0)
        cancelled = [(one, name) for one in streams for name in sent(one)]
        # The workers of parts before have to stop, and those of the next parts get no KV of them.
        expected = [(by[name], f"cancel {name}") for name in names[:number]]
        expected += [(by[after], f"cancel {name}") for name, after in pairwise(names[: number + 2])]
        assert sorted(cancelled, key=str) == sorted(expected, key=str)
        # All others go on.
        ended = {one.task.transfer_id for one in queued.parts if one.outcome.done()}
        assert ended == set(names[: number + 1]) - {"x"}
        assert queued.outcome.done() == (fails == "x")


@pytest.mark.parametrize("first", ["x.prefix.prefix", "x.prefix", "x"])
@pytest.mark.parametrize("ended", [False, True], ids=["lost", "stream"])
@pytest.mark.parametrize("order", [1, -1], ids=["first report first", "last report first"])
async def test_the_worker_of_the_part_that_failed_first_has_failed(
    first: str, ended: bool, order: int
) -> None:
    queue, streams = pair(2_048)
    queued = add_long(queue)
    names = ["x.prefix.prefix", "x.prefix", "x"]
    by = {name: one for one in streams for name in sent(one)}
    failed = asyncio.ensure_future(queued.failed_worker(Deadline.after(1.0)))
    for name in names[names.index(first) :][::order]:
        await asyncio.sleep(0)
        done = prefill_pb2.TaskDone(transfer_id=name, reason="TRANSFER_FAILED")
        if name != first:
            done.failed_part = prefill_pb2.FAILED_PART_FIRST
        elif ended:
            done.failed_part = prefill_pb2.FAILED_PART_STREAM
        queue.task_started(by[name], name)
        queue.task_ended(by[name], done)
    assert await failed == (None if ended else by[first].ref)


async def test_a_task_that_its_worker_returns_is_not_divided_again() -> None:
    queue, streams = pair()
    queued = add_long(queue, returns_max=1)
    second = next(one for one in streams if one.ref == queued.worker)
    sent(second)
    queue.task_ended(second, prefill_pb2.TaskDone(transfer_id="x", reason="DRAINING"))
    assert queued.worker not in (None, second.ref)
    assert (queued.part, queued.task.HasField("first_part")) == (None, False)
