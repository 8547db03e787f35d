"""One Pull stream to one router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace_common.errors import Draining, QueueFull
from headrace_common.queues import BoundedQueue
from headrace_prefill.worker import PrefillWorker

log = logging.getLogger(__name__)

REPORTS_MAX = 1_024


@dataclass(frozen=True, slots=True)
class _Report:
    """A message to the router; `written` is set once it is on its way."""

    message: prefill_pb2.PullRequest
    written: asyncio.Event


class PullSession:
    """Owns the tasks that one stream brought. When the stream ends, they are stopped: the router
    has them back.
    """

    def __init__(self, worker: PrefillWorker, hello: prefill_pb2.Hello, credit_share: int) -> None:
        self.was_welcome = False
        self._worker = worker
        self._share = credit_share
        self._granted = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outgoing: BoundedQueue[_Report] = BoundedQueue("pull reports", REPORTS_MAX)
        self._draining = False
        self._settled = asyncio.Event()
        self._settled.set()
        self._unsent = 0
        self._say(prefill_pb2.PullRequest(hello=hello))
        self.grant(credit_share)

    async def run(self, stub: prefill_pb2_grpc.PrefillQueueServiceAsyncStub) -> None:
        """Serves the stream until it ends. Raises AioRpcError, or QueueFull when the router does
        not read.
        """
        call = stub.Pull(self._requests())
        try:
            async for response in call:
                self.was_welcome = True
                match response.WhichOneof("message"):
                    case "task":
                        self._take(response.task)
                    case "cancel":
                        self._cancel(response.cancel.transfer_id)
                    case unknown:
                        log.warning("the router said %s, which means nothing here", unknown)
        finally:
            call.cancel()
            await self._stop_all()

    def grant(self, credit_share: int) -> None:
        """Gives the router room for more tasks, up to its share."""
        self._share = credit_share
        if self._draining or self._granted >= self._share:
            return
        more = self._share - self._granted
        self._granted = self._share
        self._say(prefill_pb2.PullRequest(credit=prefill_pb2.Credit(task_count=more)))

    async def drain(self) -> None:
        """Gives new tasks back at once, and returns when all that run have been reported."""
        self._draining = True
        await self._settled.wait()

    def _take(self, task: prefill_pb2.PrefillTask) -> None:
        transfer_id = task.transfer_id
        if transfer_id in self._tasks:
            log.warning("the router handed task %s out twice", transfer_id)
            return
        if self._draining:
            self._refuse(transfer_id, Draining(f"{self._worker.ref.worker_id} is shutting down"))
        elif len(self._tasks) >= max(self._share, self._granted):
            self._refuse(
                transfer_id, QueueFull("the router handed out more tasks than it had credit")
            )
        else:
            self._settled.clear()
            self._tasks[transfer_id] = asyncio.create_task(
                self._run(task), name=f"prefill {transfer_id}"
            )

    def _refuse(self, transfer_id: str, error: Draining | QueueFull) -> None:
        done = prefill_pb2.TaskDone(
            transfer_id=transfer_id, reason=error.reason, detail=error.detail
        )
        self._say(prefill_pb2.PullRequest(done=done))

    async def _run(self, task: prefill_pb2.PrefillTask) -> None:
        async def on_start() -> None:
            # Said before the transfer is opened, so that the router seldom hands an opened one on.
            started = prefill_pb2.TaskStarted(transfer_id=task.transfer_id)
            await self._say(prefill_pb2.PullRequest(started=started)).wait()

        def on_first_token(first: prefill_pb2.FirstToken) -> None:
            self._say(prefill_pb2.PullRequest(first_token=first))

        try:
            done = await self._worker.run(task, on_start, on_first_token)
            self._say(prefill_pb2.PullRequest(done=done))
        finally:
            self._tasks.pop(task.transfer_id, None)
            self._granted -= 1
            self.grant(self._share)
            self._note_settled()

    def _cancel(self, transfer_id: str) -> None:
        running = self._tasks.get(transfer_id)
        if running is not None:
            running.cancel()

    def stop_tasks(self) -> None:
        """Stops everything that runs; each reports its end."""
        for task in self._tasks.values():
            task.cancel()

    async def _stop_all(self) -> None:
        self._draining = True
        self.stop_tasks()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _say(self, message: prefill_pb2.PullRequest) -> asyncio.Event:
        """Queues a message; the event is set once it is on its way."""
        report = _Report(message, asyncio.Event())
        self._unsent += 1
        self._outgoing.put_nowait(report)
        return report.written

    async def _requests(self) -> AsyncIterator[prefill_pb2.PullRequest]:
        while True:
            report = await self._outgoing.get()
            yield report.message
            # gRPC asks for the next request once this one is written.
            report.written.set()
            self._unsent -= 1
            self._note_settled()

    def _note_settled(self) -> None:
        if not self._tasks and self._unsent == 0:
            self._settled.set()
