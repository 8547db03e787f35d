"""The start of a request's first step, from the scheduler's hooks."""

from __future__ import annotations

import time

from headrace_engine.vllm.scheduler.load import StepStarts


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
