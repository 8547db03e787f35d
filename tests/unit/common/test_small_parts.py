"""Deadlines, ids, queues and tasks."""

from __future__ import annotations

import asyncio

import pytest

from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, QueueFull
from headrace_common.identity import is_incarnation, is_worker_id
from headrace_common.tasks import BUGS, BackgroundTasks, BoundedQueue, end_task, run_forever


def test_the_error_of_an_expired_deadline_names_the_awaited_event() -> None:
    deadline = Deadline.after(-5)
    assert deadline.expired
    assert deadline.remaining_s() == 0
    with pytest.raises(DeadlineExceeded, match="layer 3 of rank 0") as caught:
        deadline.check("layer 3 of rank 0")
    assert caught.value.metadata == {"waited_for": "layer 3 of rank 0"}


def test_other_ids_are_rejected() -> None:
    incarnations = ["", "0" * 15, "0" * 17, "A" * 16, "g" * 16, "0" * 15 + "\n"]
    assert not list(filter(is_incarnation, incarnations))
    worker_ids = ["", "a" * 64, "Decode-0", "a b", "a/b", "décode", "a\n"]
    assert not list(filter(is_worker_id, worker_ids))


async def test_a_queue_keeps_order_and_rejects_items_beyond_its_bound() -> None:
    queue: BoundedQueue[int] = BoundedQueue("prefill", 3)
    for item in range(3):
        queue.put_nowait(item)
    with pytest.raises(QueueFull, match="queue prefill is full with 3 items") as caught:
        queue.put_nowait(3)
    assert caught.value.metadata == {"queue": "prefill", "maxsize": "3"}
    assert await queue.get() == 0
    assert [await queue.get(), await queue.get()] == [1, 2]


async def test_a_loop_outlives_its_bugs_which_are_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        turns += 1
        if turns < 3:
            raise ZeroDivisionError("as scripted")
        await asyncio.Event().wait()

    before = BUGS.total()
    task = run_forever(turn, "a loop")
    await asyncio.sleep(10)
    assert (turns, task.done()) == (3, False)
    tasks = BackgroundTasks("some work")
    tasks.start(turn())
    turns = 0
    await asyncio.sleep(0)
    await end_task(task)
    assert (BUGS.total(), BUGS["some work"]) == (before + 3, 1)
    assert caplog.text.count("ZeroDivisionError: as scripted") == 3
