"""How long prefill workers compute a token, from the tasks that they have completed."""

from __future__ import annotations

import asyncio

import pytest

from headrace.prefill.v1 import prefill_pb2
from headrace_router.prefill_queue.estimate import ComputeEstimator
from tests.unit.router.prefill_queue.test_queue import add, end, pulling


async def test_cached_tokens_and_failed_tasks_do_not_count() -> None:
    queue, (stream,) = pulling(3)
    assert queue.compute_s_per_token("sim") == 0.0
    for name in "xyz":
        add(queue, name, tokens=1_000)
    times = prefill_pb2.TaskTimes(compute_start_us=500_000, compute_end_us=2_500_000)
    done = prefill_pb2.TaskDone(transfer_id="x", cached_tokens=800, times=times)
    queue.task_ended(stream, done)
    assert queue.compute_s_per_token("sim") == pytest.approx(0.01)
    end(queue, stream, "y", reason="INTERNAL")
    # Without times, and with everything cached.
    end(queue, stream, "z")
    assert queue.compute_s_per_token("sim") == pytest.approx(0.01)
    assert queue.compute_s_per_token("another") == 0.0


async def test_a_time_from_long_ago_counts_only_without_a_bound_on_its_age() -> None:
    queue, (stream,) = pulling(1)
    add(queue, "x", tokens=100)
    times = prefill_pb2.TaskTimes(compute_start_us=1, compute_end_us=1_000_001)
    queue.task_ended(stream, prefill_pb2.TaskDone(transfer_id="x", times=times))
    await asyncio.sleep(29.0)
    assert queue.compute_s_per_token("sim", 30.0) == pytest.approx(0.01)
    await asyncio.sleep(2.0)
    assert queue.compute_s_per_token("sim", 30.0) == 0.0
    assert queue.compute_s_per_token("sim") == pytest.approx(0.01)


def test_old_tasks_lose_weight() -> None:
    computing = ComputeEstimator()
    computing.record_task(100, 1.0, 0.0)
    computing.record_task(0, 1.0, 0.0)
    computing.record_task(100, 0.0, 0.0)
    assert computing.sums() == (100.0, 1.0)
    computing.record_task(100, 10.0, 300.0)
    tokens, compute_s = computing.sums()
    assert compute_s / tokens == pytest.approx(0.1, rel=0.01)
