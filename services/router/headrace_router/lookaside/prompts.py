"""Queues the prompts of requests that have reserved blocks on their decode worker without this router."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from headrace.prefill.v1 import prefill_pb2
from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_common.errors import DeadlineExceeded, DuplicateTransfer, WorkerGone
from headrace_kv.layout.layout import WorkerRef
from headrace_router.dispatch.dispatcher import RequestDispatcher
from headrace_router.prefill_queue.queue import PrefillQueue
from headrace_router.tracing.timeline import AttemptTimeline
from headrace_router.workers.directory import WorkerDirectory
from headrace_router.workers.table import Worker

_PREFILLED_MAX: Final = 65_536


class DirectPrompts:
    """Queues each transfer once."""

    def __init__(
        self, workers: WorkerDirectory, queue: PrefillQueue, dispatcher: RequestDispatcher
    ) -> None:
        self._workers = workers
        self._queue = queue
        self._dispatcher = dispatcher
        self._prefilled: OrderedDict[str, None] = OrderedDict()

    def worker(self, ref: WorkerRef) -> Worker:
        """A live decode worker. Raises WorkerGone."""
        worker = self._workers.worker(ref)
        if worker is None:
            raise WorkerGone(
                f"decode worker {ref.worker_id} has left", metadata={"worker_id": ref.worker_id}
            )
        return worker

    async def hand_over(
        self,
        task: prefill_pb2.PrefillTask,
        prompt: tuple[int, ...],
        worker: Worker,
        deadline: Deadline,
        timeline: AttemptTimeline | None = None,
        *,
        priority: Priority = Priority.NORMAL,
    ) -> prefill_pb2.EnqueueResponse:
        """Queues `task` for a decode worker, and returns once its KV cache was handed over. `timeline` gets its steps.

        `prompt` has the last token too, which decode computes. Raises DuplicateTransfer on a repeated call, QueueFull,
        WorkerGone, DeadlineExceeded, or the error of the prefill worker. Cancellation cancels the task.
        """
        self._reject_repeated(task.transfer_id)
        terms = self._dispatcher.task_terms(
            *(worker, prompt, task.cache_salt, deadline), priority=priority
        )
        queued = self._queue.enqueue(task, layout=worker.layout, terms=terms)
        if timeline is not None:
            timeline.queued(queued)
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                outcome = await asyncio.shield(queued.outcome)
        except TimeoutError:
            what = "a prefill worker"
            raise DeadlineExceeded(
                f"the deadline passed while waiting for {what}", metadata={"waited_for": what}
            ) from None
        finally:
            # Has no effect on a task that has ended.
            queued.cancel()
        if outcome.error is not None:
            raise outcome.error
        done = outcome.done or prefill_pb2.TaskDone()
        return prefill_pb2.EnqueueResponse(
            worker_id=queued.worker.worker_id if queued.worker is not None else "",
            cached_tokens=done.cached_tokens,
            payload_bytes=done.payload_bytes,
        )

    def _reject_repeated(self, transfer_id: str) -> None:
        if transfer_id in self._prefilled:
            raise DuplicateTransfer(
                f"the prompt of {transfer_id} was queued before",
                metadata={"transfer_id": transfer_id},
            )
        self._prefilled[transfer_id] = None
        if len(self._prefilled) > _PREFILLED_MAX:
            self._prefilled.popitem(last=False)
