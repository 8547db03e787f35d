"""The models that clients can call."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from headrace.inference.v1 import inference_pb2
from headrace_frontend.openai.parts import system_fingerprint
from headrace_frontend.request.model_names import ModelChoice
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
        """The served models with at least one live decode worker, by name, each followed by its adapters."""
        contexts = self._workers.max_model_len()
        decode_counts = self._workers.decode_worker_counts()
        prefill_counts = self._queue.worker_counts()
        found: list[inference_pb2.Model] = []
        for name in self._names:
            if name in decode_counts:
                model = inference_pb2.Model(
                    name=name,
                    max_model_len=contexts[name],
                    prefill_worker_count=prefill_counts.get(name, 0),
                    decode_worker_count=decode_counts[name],
                )
                found += [model, *self._adapters_of(model)]
        return found

    def system_fingerprint(self, choice: ModelChoice) -> str:
        """As `ModelLister` has it."""
        return system_fingerprint(self._workers.table(choice.model).engine_hashes, choice.adapter)

    def _adapters_of(self, model: inference_pb2.Model) -> Iterator[inference_pb2.Model]:
        table = self._workers.table(model.name)
        if not table.adapters:
            return
        prefill_counts = self._queue.adapter_worker_counts()
        for name, adapter in sorted(table.adapters.items()):
            # Clients cannot select an adapter by the name of a model.
            if name not in self._names:
                yield inference_pb2.Model(
                    name=name,
                    max_model_len=model.max_model_len,
                    prefill_worker_count=prefill_counts.get((model.name, adapter), 0),
                    decode_worker_count=int(table.serving(adapter).sum()),
                    parent=model.name,
                )
