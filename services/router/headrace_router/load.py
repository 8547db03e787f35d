"""LoadService: what waits on this router, and sums over its answered requests, for planners."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import grpc.aio

from headrace.inference.v1 import load_pb2, load_pb2_grpc
from headrace_frontend.admission.admission import Admission
from headrace_router.prefill_queue.queue import PrefillQueue


class LoadReader(load_pb2_grpc.LoadServiceServicer):
    """Answers planners. `models` are the names that this router serves."""

    def __init__(
        self,
        models: Collection[str],
        queue: PrefillQueue,
        admission: Admission,
        answered: Callable[[str], load_pb2.RequestTotals],
    ) -> None:
        """`answered`: see RouterMetrics."""
        self._models = sorted(models)
        self._queue = queue
        self._admission = admission
        self._answered = answered

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
            answered=self._answered(model),
            queued_by_class=load_pb2.ClassCounts(**depths),
        )
