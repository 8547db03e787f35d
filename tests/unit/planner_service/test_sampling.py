"""What routers and workers report becomes an observation."""

from __future__ import annotations

import pytest

from headrace.inference.v1 import load_pb2
from headrace.worker.v1 import worker_pb2
from headrace_planner.observation import ClassCounts, WorkerCounts
from headrace_planner_service.observer import DecodeReading, load_sample, request_statistics

STATES = worker_pb2.WatchStatusResponse


def status(**fields: int) -> worker_pb2.WatchStatusResponse:
    return STATES(**{"state": STATES.STATE_SERVING, **fields})  # type: ignore[arg-type]


def decode(**fields: int) -> DecodeReading:
    return DecodeReading(status(**fields), 4)


def totals(count: int, scale: int = 1) -> load_pb2.RequestTotals:
    return load_pb2.RequestTotals(
        request_count=count,
        prompt_tokens=100 * count * scale,
        cached_prompt_tokens=25 * count * scale,
        answer_tokens=11 * count * scale,
        time_to_first_token_us=200_000 * count,
        streaming_us=500_000 * count,
        duration_us=700_000 * count,
    )


def test_prompts_wait_on_routers_and_on_prefill_workers() -> None:
    routers = [load_pb2.ModelLoad(queued_prompts=3), load_pb2.ModelLoad(queued_prompts=1)]
    sample = load_sample(routers, [status(waiting_requests=2, running_requests=9), status()], [])
    assert sample.prefill_workers == 2
    assert sample.queued_prompts == 6
    assert sample.decode_load == 0


def test_workers_of_both_roles_are_counted_once_and_divide_the_queue() -> None:
    routers = [load_pb2.ModelLoad(queued_prompts=6)]
    both = [DecodeReading(status(), 4, has_both=True) for _ in range(3)]
    draining = DecodeReading(status(state=STATES.STATE_DRAINING), 4, has_both=True)
    sample = load_sample(routers, [], [*both, draining])
    assert sample.counts == WorkerCounts(0, 0, 3)
    assert sample.queue_per_worker() == 2


def test_prompts_of_a_pool_wait_in_queues_or_on_workers_and_those_in_computation_do_not() -> None:
    routers = [load_pb2.ModelLoad(queued_prompts=2)]
    # The queued ones and 4 others wait here. Of these, 3 are computed there.
    here, there = status(waiting_requests=6), status(running_prompts=3)
    both = [DecodeReading(one, 8, has_both=True) for one in (here, there)]
    assert load_sample(routers, [], both).queued_prompts == 3
    apart = [DecodeReading(one, 8) for one in (here, there)]
    assert load_sample(routers, [], apart).queued_prompts == 2


def test_queued_prompts_of_each_class_are_those_of_all_routers() -> None:
    routers = [
        load_pb2.ModelLoad(
            queued_prompts=6, queued_by_class=load_pb2.ClassCounts(high=1, normal=2, low=3)
        ),
        load_pb2.ModelLoad(queued_prompts=4, queued_by_class=load_pb2.ClassCounts(low=4)),
        # A router of an older version does not report classes.
        load_pb2.ModelLoad(queued_prompts=5),
    ]
    sample = load_sample(routers, [], [])
    assert sample.queued_prompts == 15
    assert sample.queued_by_class == ClassCounts(high=1, normal=2, low=7)


def test_the_load_of_a_decode_worker_is_that_of_its_scarcer_resource() -> None:
    blocks = decode(total_blocks=10, used_blocks=4, reserved_blocks=5, quarantined_blocks=3)
    slots = decode(total_blocks=10, used_blocks=2, running_requests=2, waiting_requests=1)
    first, second = load_sample([], [], [blocks, slots]).decode
    assert first.load == pytest.approx(0.8)
    assert second.load == pytest.approx(0.75 + 0.02)
    over = load_sample([], [], [decode(total_blocks=1, used_blocks=2)]).decode
    assert over[0].kv_usage == 1
    assert load_sample([], [], [decode()]).decode[0].kv_usage == 0


def test_requests_that_wait_on_routers_count_once_over_all_decode_workers() -> None:
    routers = [load_pb2.ModelLoad(waiting_requests=4), load_pb2.ModelLoad(waiting_requests=1)]
    sample = load_sample(routers, [], [decode(), decode(waiting_requests=1)])
    assert [worker.waiting_requests for worker in sample.decode] == [3, 3]
    assert load_sample(routers, [], []).decode == ()


def test_workers_that_drain_are_left_out() -> None:
    leaving = status(state=STATES.STATE_DRAINING, waiting_requests=5, used_blocks=1, total_blocks=1)
    sample = load_sample([], [leaving, status()], [DecodeReading(leaving, 4)])
    assert (sample.counts.prefill, sample.counts.decode, sample.queued_prompts) == (1, 0, 0)


def test_requests_are_the_difference_of_two_readings_over_all_routers() -> None:
    before = {"a": totals(10), "b": totals(4)}
    found = request_statistics(before, {"a": totals(13), "b": totals(5)})
    assert found is not None
    assert found.request_count == 4
    assert found.prompt_tokens == 100
    assert found.answer_tokens == 11
    assert found.cached_share == 0.25
    assert found.ttft_s == pytest.approx(0.2)
    assert found.itl_s == pytest.approx(0.05)
    assert found.duration_s == pytest.approx(0.7)


def test_a_router_that_was_not_read_before_counts_from_now_on() -> None:
    assert request_statistics({}, {"new": totals(1_000)}) is None
    found = request_statistics({"a": totals(1)}, {"a": totals(2), "new": totals(1_000)})
    assert found is not None
    assert found.request_count == 1


def test_a_router_that_started_again_counts_what_it_has_answered_since() -> None:
    found = request_statistics({"a": totals(1_000)}, {"a": totals(3)})
    assert found is not None
    assert found.request_count == 3
    assert found.prompt_tokens == 100


def test_answers_of_one_token_have_no_gaps() -> None:
    one = load_pb2.RequestTotals(request_count=1, answer_tokens=1, duration_us=5)
    found = request_statistics({"a": load_pb2.RequestTotals()}, {"a": one})
    assert found is not None
    assert (found.itl_s, found.cached_share) == (0, 0)
