"""What planners read of a router: sums over its answered requests, and what waits there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from headrace.inference.v1 import load_pb2
from headrace_frontend.admission.admission import Admission
from headrace_router.load import LoadReader, LoadRecorder, RequestTotals
from headrace_router.prefill_queue.queue import PrefillQueue

MS = 1_000_000


def totals() -> RequestTotals:
    sums = RequestTotals()
    for tokens in (100, 300):
        sums.add(
            "m",
            prompt_tokens=tokens,
            cached_tokens=40,
            answer_tokens=10,
            first_token_ns=200 * MS,
            duration_ns=500 * MS,
        )
    return sums


def test_no_sum_shrinks_when_figures_contradict_each_other() -> None:
    sums = RequestTotals()
    sums.add(
        "m",
        prompt_tokens=5,
        cached_tokens=9,
        answer_tokens=1,
        first_token_ns=2 * MS,
        duration_ns=-MS,
    )
    assert sums.of("m") == load_pb2.RequestTotals(
        request_count=1,
        prompt_tokens=5,
        cached_prompt_tokens=5,
        answer_tokens=1,
        time_to_first_token_us=2_000,
    )


async def test_every_served_model_has_an_entry_of_its_own() -> None:
    depths = {"m": 3, "other": 1}
    queue = SimpleNamespace(
        estimate=lambda model: SimpleNamespace(depth=depths[model]),
        depths=lambda model: {"high": 0, "normal": 1, "low": depths[model] - 1},
    )
    admission = SimpleNamespace(waiting_for_slot=lambda model: 10 * depths[model])
    reader = LoadReader(
        ["other", "m"],
        cast("PrefillQueue", queue),
        cast("Admission", admission),
        totals(),
        LoadRecorder(),
    )
    answer = await reader.GetLoad(load_pb2.GetLoadRequest(), cast("Any", None))
    found = [
        (one.model, one.queued_prompts, one.waiting_requests, one.answered.request_count)
        for one in answer.models
    ]
    assert found == [("m", 3, 30, 2), ("other", 1, 10, 0)]
    first, second = (one.queued_by_class for one in answer.models)
    assert (first.high, first.normal, first.low) == (0, 1, 2)
    assert (second.normal, second.low) == (1, 0)
