"""When the prefill queue has two workers compute one prompt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
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
    step_tokens: int = 8_192, *, beside: bool = True, times: TimeModel = TIMES
) -> tuple[PrefillQueue, list[PrefillWorkerStream]]:
    """A queue with two workers, which have learned `times`."""
    queue, streams = pulling(2, 2)
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
    ("step_tokens", "token"), [(1_024, 0), (2_048, 6_000), (4_096, 4_000), (8_192, 4_000)]
)
async def test_a_long_prompt_is_divided_where_one_step_of_both_is_enough_of_it(
    step_tokens: int, token: int
) -> None:
    queue, (first, second) = pair(step_tokens)
    queued = add_long(queue)
    assert part_of(queued) == pytest.approx(token, abs=200)
    assert part_of(queued) % LAYOUT.block_tokens == 0
    if not token:
        return
    # Each has a slot of the one, and nothing else.
    assert {first.credits, second.credits} == {1}
    assert queued.part is not None
    tasks = {one.ref: one.outbox.get_nowait().task for one in (first, second)}
    assert queued.worker is not None
    assert queued.part.worker is not None
    own, part = tasks[queued.worker], tasks[queued.part.worker]
    assert (own.transfer_id, part.transfer_id) == ("x", "x.prefix")
    assert (len(own.token_ids), len(part.token_ids)) == (LONG, part_of(queued))
    assert own.first_part == prefill_pb2.FirstPart(
        worker_id=queued.part.worker.worker_id, incarnation="i0", end_token=part_of(queued)
    )
    receiver = WorkerRef(part.decode_worker_id, part.decode_incarnation)
    assert (receiver, part.decode_endpoint) == (queued.worker, f"{receiver.worker_id}:1")
    assert not part.HasField("first_part")


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
    queue, (first, _) = pair()
    queued = add_long(queue, cached={first.ref: 4_000})
    assert part_of(queued) == pytest.approx(6_000, abs=300)
    assert queued.part is not None
    assert queued.part.worker == first.ref


async def test_the_failure_of_one_worker_ends_the_work_of_the_other() -> None:
    for fails in ("x", "x.prefix"):
        queue, streams = pair()
        queued = add_long(queue)
        by = {name: one for one in streams for name in sent(one)}
        other = ({"x", "x.prefix"} - {fails}).pop()
        stream = by[fails]
        queue.task_started(stream, fails)
        queue.task_ended(stream, prefill_pb2.TaskDone(transfer_id=fails, reason="INTERNAL"))
        await asyncio.sleep(0)
        # The second worker gets no first part, and goes on. The first one has to stop.
        assert sent(by[other]) == ["cancel x.prefix"]
        assert queued.outcome.done() == (fails == "x")


async def test_a_task_that_its_worker_returns_is_not_divided_again() -> None:
    queue, streams = pair()
    queued = add_long(queue, returns_max=1)
    second = next(one for one in streams if one.ref == queued.worker)
    sent(second)
    queue.task_ended(second, prefill_pb2.TaskDone(transfer_id="x", reason="DRAINING"))
    assert queued.worker not in (None, second.ref)
    assert (queued.part, queued.task.HasField("first_part")) == (None, False)
