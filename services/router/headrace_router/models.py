"""The models that clients can call."""

from __future__ import annotations

from collections.abc import Collection

from headrace.inference.v1 import inference_pb2
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.workers.directory import WorkerDirectory


class ModelCatalog:
    """Joins the names that this router serves with the live workers."""

    def __init__(
        self, names: Collection[str], workers: WorkerDirectory, queue: PrefillQueue
    ) -> None:
        self._names = sorted(names)
        self._workers = workers
        self._queue = queue

    def list_models(self) -> list[inference_pb2.Model]:
        """The served models with at least one live decode worker, by name."""
        contexts = self._workers.max_model_len()
        decode_counts = self._workers.decode_worker_counts()
        prefill_counts = self._queue.worker_counts()
        return [
            inference_pb2.Model(
                name=name,
                max_model_len=contexts[name],
                prefill_worker_count=prefill_counts.get(name, 0),
                decode_worker_count=decode_counts[name],
            )
            for name in self._names
            if name in decode_counts
        ]
