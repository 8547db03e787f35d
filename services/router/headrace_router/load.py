"""LoadService: what waits on this router, and sums over its answered requests, for planners."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import grpc.aio

from headrace.inference.v1 import load_pb2, load_pb2_grpc
from headrace_frontend.admission.admission import Admission
from headrace_router.prefill_queue.queue import PrefillQueue


class RequestTotals:
    """Sums over the answered requests of each model. One event loop owns it."""

    def __init__(self) -> None:
        self._totals: dict[str, load_pb2.RequestTotals] = {}

    def add(
        self,
        model: str,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        answer_tokens: int,
        first_token_ns: int,
        duration_ns: int,
    ) -> None:
        """Counts an answered request. The times begin with its arrival."""
        totals = self._totals.setdefault(model, load_pb2.RequestTotals())
        totals.request_count += 1
        totals.prompt_tokens += prompt_tokens
        totals.cached_prompt_tokens += min(cached_tokens, prompt_tokens)
        totals.answer_tokens += answer_tokens
        first_us, duration_us = max(0, first_token_ns) // 1000, max(0, duration_ns) // 1000
        totals.time_to_first_token_us += first_us
        totals.streaming_us += max(0, duration_us - first_us)
        totals.duration_us += duration_us

    def of(self, model: str) -> load_pb2.RequestTotals:
        """The sums of one model. Do not change them."""
        return self._totals.get(model, load_pb2.RequestTotals())


class LoadReader(load_pb2_grpc.LoadServiceServicer):
    """Answers planners. `models` are the names that this router serves."""

    def __init__(
        self,
        models: Collection[str],
        queue: PrefillQueue,
        admission: Admission,
        totals: RequestTotals,
    ) -> None:
        self._models = sorted(models)
        self._queue = queue
        self._admission = admission
        self._totals = totals

    async def GetLoad(
        self,
        request: load_pb2.GetLoadRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> load_pb2.GetLoadResponse:
        """The load of every served model, by name."""
        return load_pb2.GetLoadResponse(models=map(self._load_of, self._models))

    def _load_of(self, model: str) -> load_pb2.ModelLoad:
        depths = self._queue.depths(model)
        return load_pb2.ModelLoad(
            model=model,
            queued_prompts=sum(depths.values()),
            waiting_requests=self._admission.waiting_for_slot(model),
            answered=self._totals.of(model),
            queued_by_class=load_pb2.ClassCounts(**depths),
        )
