"""The load and the steps of an engine, from the scheduler's hooks."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from headrace_common.time_model.model import NO_STEPS, Step
from headrace_engine.receipts import StepColumns
from headrace_engine.steps import EngineSteps
from headrace_engine.vllm.link.messages import EngineLoad, load_from_proto, load_to_proto
from headrace_engine.vllm.scheduler.load import LoadMeter, StepStarts, columns_of, report_changes
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.promises import PromiseCounts


def output(
    new: dict[str, tuple[int, int]] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    drafts: dict[str, list[int]] | None = None,
    preempted: set[str] | None = None,
) -> Any:
    """A step, with the computed tokens and the tokens of each request."""
    new, cached = new or {}, cached or {}
    counts = {name: count for name, (_, count) in {**new, **cached}.items()}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed)
            for name, (computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[computed for computed, _ in cached.values()]
        ),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens=drafts or {},
        preempted_req_ids=preempted,
    )


def test_answers_count_with_their_context() -> None:
    step = columns_of(output({"a": (99, 1)}, {"b": (10, 1), "c": (20, 1)})).as_step()
    assert step == Step(running=3, context_tokens=129)


def test_a_part_of_a_prompt_attends_to_what_is_before_it() -> None:
    parts = columns_of(output(cached={"a": (512, 256)}))
    assert parts.as_step() == Step(256, 256 * (512 + 128))


def test_prompts_and_answers_share_a_step() -> None:
    step = columns_of(output({"a": (0, 100)}, {"b": (300, 1)})).as_step()
    assert step == Step(100, 100 * 50, 1, 300)


def test_prompts_of_others_are_sent() -> None:
    step = columns_of(output({"a": (0, 100), "b": (0, 60)})).as_step({"b"})
    assert (step.prompt_tokens, step.sent_tokens) == (160, 60)


def test_drafts_make_no_prompt_of_an_answer() -> None:
    found = output(cached={"a": (300, 4)}, drafts={"a": [1, 2, 3]})
    assert columns_of(found).as_step() == Step(running=1, context_tokens=300)
    assert columns_of(found) == StepColumns(["a"], [300], [])


def test_a_step_has_a_column_for_what_it_computes_of_each_request() -> None:
    answers = output({"a": (99, 1)}, {"b": (10, 1), "c": (20, 1)})
    assert columns_of(answers) == StepColumns(["b", "c", "a"], [10, 20, 99])
    both = output({"a": (0, 100)}, {"b": (300, 1)})
    assert columns_of(both) == StepColumns(["b"], [300], [("a", 0, 100)])


def test_only_a_request_that_ends_by_a_step_gets_a_receipt() -> None:
    meter = LoadMeter()
    for name in "ab":
        meter.request_added(name)
    meter.step_planned(output({"a": (0, 9), "b": (0, 9)}))
    assert meter.request_finished("b", by_step=False, billed=False).computed_tokens == 0
    cost = meter.request_finished("a")
    meter.step_ended()
    assert cost.computed_tokens == 9
    # The whole step is of the request that is left.
    time = meter.steps.time
    assert time.billed_s == time.computing_s == cost.prefill_s > 0


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


def test_each_request_is_reported_once_with_its_first_step() -> None:
    reported: list[tuple[str, int]] = []
    starts = StepStarts(lambda name, at_ns: reported.append((name, at_ns)))
    starts.request_added("a-1", "a")
    starts.request_added("b-1", "b")
    starts.request_added("c-1", "")
    before_ns = time.monotonic_ns()
    # A request that waits for its KV has no tokens in a step.
    starts.step_planned({"other": 3, "c-1": 1})
    assert reported == []
    starts.step_planned({"a-1": 1, "other": 3})
    starts.step_planned({"a-1": 1})
    ((name, at_ns),) = reported
    assert name == "a"
    assert before_ns <= at_ns <= time.monotonic_ns()
    starts.step_planned({"a-1": 1, "b-1": 5})
    assert [name for name, _ in reported] == ["a", "b"]


def test_a_request_that_ends_before_its_first_step_is_forgotten() -> None:
    reported: list[str] = []
    starts = StepStarts(lambda name, _: reported.append(name))
    starts.request_added("a-1", "a")
    starts.request_finished("a-1")
    starts.request_finished("never added")
    starts.step_planned({"a-1": 1})
    assert reported == []
