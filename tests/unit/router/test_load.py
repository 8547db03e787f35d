"""What planners read of a router: sums over its answered requests, and what waits there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from headrace.inference.v1 import load_pb2
from headrace_frontend.running.runner import RequestRunner
from headrace_router.load import LoadReader, LoadRecorder
from headrace_router.prefill_queue.queue import PrefillQueue


async def test_every_served_model_has_an_entry_of_its_own() -> None:
    depths = {"m": 3, "other": 1}
    queue = SimpleNamespace(
        depths=lambda model: {"high": 0, "normal": 1, "low": depths[model] - 1},
    )
    admission = SimpleNamespace(waiting_for_slot=lambda model: 10 * depths[model])
    answered = {"m": load_pb2.RequestTotals(request_count=2)}
    reader = LoadReader(
        ["other", "m"],
        cast("PrefillQueue", queue),
        cast("RequestRunner", SimpleNamespace(admission=admission)),
        lambda model: answered.get(model, load_pb2.RequestTotals()),
        LoadRecorder(),
    )
    answer = await reader.GetLoad(load_pb2.GetLoadRequest(), cast("Any", None))
    found = [
        (one.model, one.queued_prompts, one.waiting_requests, one.answered.request_count)
        for one in answer.models
    ]
    assert found == [("m", 3, 30, 2), ("other", 1, 10, 0)]
    by_class = [one.queued_by_class for one in answer.models]
    assert [(one.high, one.normal, one.low) for one in by_class] == [(0, 1, 2), (0, 1, 0)]
