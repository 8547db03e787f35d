"""The load of an engine, counted from the scheduler's hooks."""

from __future__ import annotations

import asyncio

from headrace_common.time_model.model import NO_STEPS
from headrace_engine.steps import EngineSteps
from headrace_engine.vllm.link.messages import EngineLoad, load_from_proto, load_to_proto
from headrace_engine.vllm.scheduler.load import LoadMeter, report_changes
from headrace_kv.manager.promises import PromiseCounts
from headrace_kv.prefix.events import Tier
from tests.unit.engine.vllm.scheduler.test_planned_steps import output


def test_requests_count_as_waiting_and_running_through_every_state() -> None:
    meter = LoadMeter()
    assert meter.read() == EngineLoad()
    meter.bind(lambda: (3, 10))
    meter.request_added("a")
    meter.request_added("b")
    assert meter.read() == EngineLoad(0, 2, 3, 10)
    meter.step_planned(output({"a": (0, 1), "b": (0, 1)}))
    assert meter.read() == EngineLoad(2, 0, 3, 10)
    # A request without tokens in a step still runs.
    meter.step_planned(output(cached={"a": (1, 1)}))
    assert meter.read() == EngineLoad(2, 0, 3, 10)
    meter.step_planned(output(cached={"a": (2, 1)}, preempted={"b"}))
    assert meter.read() == EngineLoad(1, 1, 3, 10)
    # Preempted between two steps, and scheduled again in the next.
    meter.step_planned(output(cached={"a": (0, 1), "b": (0, 1)}, preempted={"a"}))
    assert meter.read() == EngineLoad(2, 0, 3, 10)
    meter.request_finished("a")
    meter.request_finished("b")
    assert meter.read() == EngineLoad(0, 0, 3, 10)


def test_steps_are_measured_from_the_plan_to_their_results() -> None:
    meter = LoadMeter()
    meter.request_added("a")
    meter.step_planned(output({"a": (0, 64)}))
    planned, before = meter.steps, meter.step_times
    meter.step_ended()
    assert (planned, before) == (EngineSteps(2, 1, 64), NO_STEPS)
    assert meter.step_times.prompt_steps == meter.read().step_times.prompt_steps == 1
    meter.request_finished("a")
    assert meter.steps == EngineSteps(2)


def test_a_request_that_never_ran_is_not_counted_after_its_end() -> None:
    meter = LoadMeter()
    meter.request_added("a")
    meter.request_finished("a")
    assert meter.read() == EngineLoad()


async def test_only_changes_are_sent() -> None:
    meter = LoadMeter()
    counts = iter([0, 0, 2, 2])
    done = asyncio.Event()

    def count_blocks() -> tuple[int, int]:
        used = next(counts, None)
        if used is None:
            done.set()
        return 2 if used is None else used, 4

    meter.bind(count_blocks)
    sent: list[EngineLoad] = []
    task = asyncio.create_task(report_changes(meter, sent.append))
    async with asyncio.timeout(10):
        await done.wait()
    task.cancel()
    assert sent == [EngineLoad(0, 0, 0, 4), EngineLoad(0, 0, 2, 4)]


def test_a_load_is_equal_after_conversion_for_the_link() -> None:
    promises = PromiseCounts(5, {Tier.HOST: 6, Tier.DISK: 0}, 7)
    load = EngineLoad(1, 2, 3, 4, promises=promises)
    assert load_from_proto(load_to_proto(load)) == load
