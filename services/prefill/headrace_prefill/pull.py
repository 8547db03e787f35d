"""Pulls tasks from every live router."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import TypeAlias

import grpc.aio

from headrace.kv.v1 import layout_pb2
from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace_common.config import ServiceConfig
from headrace_common.deadlines import Deadline
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import Draining, QueueFull
from headrace_common.process.events import EVENTS
from headrace_common.registry.adapters import Adapter, adapter_to_proto
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_common.tasks import BoundedQueue, run_forever
from headrace_common.time_model.model import time_model_to_proto
from headrace_engine.worker.config import WorkerConfig, served_model
from headrace_engine.worker.host import HostedWorker
from headrace_kv.layout import layout_to_proto
from headrace_prefill.worker import STALL_POLL_S, PrefillWorker

log = logging.getLogger(__name__)

REPORTS_MAX = 1_024
BATCH_MAX = 256
# Longest time between two messages to a router with tasks here.
MAX_INTERVAL_S = 2.0
_TIMES_INTERVAL_S = 0.5


_Report: TypeAlias = tuple[prefill_pb2.PullRequest, asyncio.Event]
"""A message to the router, and what is set once gRPC has taken it."""


class PullSession:
    """Owns the tasks of one stream. When the stream ends, they are stopped: the router requeues them.

    Credit is the number of tasks that the router may still send. `granted` counts the credit that was given, until its
    task has ended. `on_change` is called when a task has started or ended.
    """

    def __init__(
        self, worker: PrefillWorker, hello: prefill_pb2.Hello, on_change: Callable[[], None]
    ) -> None:
        self._worker = worker
        self._on_change = on_change
        self.answered = False
        """Whether the router has sent a message."""
        self.granted = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._outgoing: BoundedQueue[_Report] = BoundedQueue("pull reports", REPORTS_MAX)
        self._draining = False
        self._unsent = 0
        self._times_due_s = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._hello = prefill_pb2.PullRequest(hello=hello)
        self._busy = asyncio.Event()
        self._sent_s = 0.0

    @property
    def running(self) -> int:
        """The tasks of the router that run here."""
        return len(self._tasks)

    @property
    def unused(self) -> int:
        """The tasks that the router may still send."""
        return self.granted - len(self._tasks)

    async def run(self, stub: prefill_pb2_grpc.PrefillQueueServiceAsyncStub) -> None:
        """Serves the stream until it ends, or until the engine is stalled.

        Raises AioRpcError, or QueueFull when the router does not read.
        """
        call = stub.Pull(self._requests())
        tasks = {asyncio.create_task(self._read(call)), asyncio.create_task(self._watch_engine())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stop_all()

    async def _read(
        self, call: grpc.aio.StreamStreamCall[prefill_pb2.PullRequest, prefill_pb2.PullResponse]
    ) -> None:
        async for response in call:
            self.answered = True
            match response.WhichOneof("message"):
                case "task":
                    self._start_task(response.task)
                case "cancel":
                    self._cancel_task(response.cancel.transfer_id)
                case unknown:
                    log.warning("the router sent an unknown message %s", unknown)

    async def _watch_engine(self) -> None:
        """While there are tasks: shows the router that this process runs. Returns when the engine is stalled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._busy.wait()
            await asyncio.sleep(STALL_POLL_S)
            stall = self._worker.stall()
            if stall is not None and self._tasks:
                log.warning("%s: %d tasks go to other workers", stall, len(self._tasks))
                return
            if loop.time() >= self._sent_s + MAX_INTERVAL_S / 2 and not self._unsent:
                self._send(prefill_pb2.PullRequest(credit=prefill_pb2.Credit(task_count=0)))

    def grant(self, task_count: int) -> None:
        """Lets the router send so many more tasks."""
        if self._draining or task_count < 1:
            return
        self.granted += task_count
        credit = prefill_pb2.Credit(task_count=task_count)
        self._send(prefill_pb2.PullRequest(credit=credit))

    async def drain(self) -> None:
        """Refuses new tasks, and returns when all running tasks have been reported."""
        self._draining = True
        await self._idle.wait()

    def cancel_tasks(self) -> None:
        """Cancels all running tasks; each reports its end."""
        for task in self._tasks.values():
            task.cancel()

    def _start_task(self, task: prefill_pb2.PrefillTask) -> None:
        transfer_id = task.transfer_id
        if transfer_id in self._tasks:
            log.warning("the router sent task %s twice", transfer_id)
            return
        if self._draining:
            self._refuse(transfer_id, Draining(f"{self._worker.ref.worker_id} is shutting down"))
        elif len(self._tasks) >= self.granted:
            self._refuse(transfer_id, QueueFull("the router sent more tasks than it had credit"))
        else:
            self._idle.clear()
            self._busy.set()
            self._tasks[transfer_id] = asyncio.create_task(
                self._run_task(task), name=f"prefill {transfer_id}"
            )
            self._on_change()

    def _add_times(self, done: prefill_pb2.TaskDone, decode_worker_id: str) -> None:
        """Adds what the worker has learned of its times, unless the router has got it a moment ago."""
        now_s = time.monotonic()
        if now_s >= self._times_due_s:
            self._times_due_s = now_s + _TIMES_INTERVAL_S
            done.time_model.CopyFrom(time_model_to_proto(self._worker.times(decode_worker_id)))

    def _send_done(self, done: prefill_pb2.TaskDone) -> None:
        EVENTS.add_message(done)
        self._send(prefill_pb2.PullRequest(done=done))

    def _refuse(self, transfer_id: str, error: Draining | QueueFull) -> None:
        done = prefill_pb2.TaskDone(
            transfer_id=transfer_id, reason=error.reason, detail=error.detail
        )
        self._send_done(done)

    async def _run_task(self, task: prefill_pb2.PrefillTask) -> None:
        async def on_start() -> None:
            # Written before the transfer is opened, so that the router rarely requeues an opened one.
            started = prefill_pb2.TaskStarted(transfer_id=task.transfer_id)
            await self._send(prefill_pb2.PullRequest(started=started)).wait()

        def on_first_token(first: prefill_pb2.FirstToken) -> None:
            self._send(prefill_pb2.PullRequest(first_token=first))

        try:
            done = await self._worker.run(task, on_start, on_first_token)
            self._add_times(done, task.decode_worker_id)
            self._send_done(done)
        finally:
            self._tasks.pop(task.transfer_id, None)
            if not self._tasks:
                self._busy.clear()
            self.granted -= 1
            self._on_change()
            self._update_idle()

    def _cancel_task(self, transfer_id: str) -> None:
        running = self._tasks.get(transfer_id)
        if running is not None:
            running.cancel()
        else:
            self._worker.cancel_part(transfer_id)

    async def _stop_all(self) -> None:
        self._draining = True
        self.cancel_tasks()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _send(self, message: prefill_pb2.PullRequest) -> asyncio.Event:
        """Queues a message. The event is set once gRPC has taken it."""
        written = asyncio.Event()
        self._unsent += 1
        self._sent_s = asyncio.get_running_loop().time()
        self._outgoing.put_nowait((message, written))
        return written

    async def _requests(self) -> AsyncIterator[prefill_pb2.PullRequest]:
        yield self._hello
        while True:
            reports = [await self._outgoing.get()]
            while not self._outgoing.empty() and len(reports) < BATCH_MAX:
                reports.append(self._outgoing.get_nowait())
            yield _combined([message for message, _ in reports])
            # gRPC requests the next message once this one is written.
            for _, written in reports:
                written.set()
            self._unsent -= len(reports)
            self._update_idle()

    def _update_idle(self) -> None:
        if not self._tasks and self._unsent == 0:
            self._idle.set()


def _combined(messages: list[prefill_pb2.PullRequest]) -> prefill_pb2.PullRequest:
    if len(messages) == 1:
        return messages[0]
    return prefill_pb2.PullRequest(batch=prefill_pb2.PullRequestBatch(requests=messages))


RETRY_S_MIN = 0.1
RETRY_S_MAX = 3.0

RouterKey: TypeAlias = tuple[str, str, str]
"""Id, incarnation and endpoint of a router."""


class TaskPuller:
    """Keeps one Pull stream to each router incarnation. Routers with tasks that wait share the slots equally."""

    def __init__(
        self,
        config: ServiceConfig,
        worker: PrefillWorker,
        *,
        model: str,
        layout: layout_pb2.KvLayout,
    ) -> None:
        self._config = config
        self._worker = worker
        self._hello = prefill_pb2.Hello(
            worker_id=worker.ref.worker_id,
            incarnation=worker.ref.incarnation,
            model=model,
            layout=layout,
            max_interval=duration_from_seconds(MAX_INTERVAL_S),
        )
        self._streams: dict[RouterKey, asyncio.Task[None]] = {}
        self._sessions: dict[RouterKey, PullSession] = {}
        self._draining = False

    def set_adapters(self, adapters: Iterable[Adapter]) -> None:
        """New streams announce these. Routers learn a change from the registry."""
        del self._hello.adapters[:]
        self._hello.adapters.extend(map(adapter_to_proto, adapters))

    def set_routers(self, routers: Iterable[registry_pb2.Member]) -> None:
        """Opens streams to new routers, and ends those to routers that have left."""
        if self._draining:
            return
        wanted = {(router.worker_id, router.incarnation, router.endpoint) for router in routers}
        for left in self._streams.keys() - wanted:
            self._streams.pop(left).cancel()
        for key in wanted - self._streams.keys():
            self._streams[key] = run_forever(partial(self._pull, key), f"pull from {key[0]}")
        self._grant_credit()

    async def drain(self, deadline: Deadline) -> None:
        """Refuses new tasks, and returns when every task has ended and been reported.

        At the deadline, running tasks are cancelled and reported with Draining. The caller bounds
        the wait for that.
        """
        self._draining = True
        self._worker.start_drain()
        sessions = tuple(self._sessions.values())
        drains = asyncio.gather(*(session.drain() for session in sessions))
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await asyncio.shield(drains)
        except TimeoutError:
            for session in sessions:
                session.cancel_tasks()
            await drains

    async def close(self) -> None:
        """Ends every stream; running tasks are cancelled first."""
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    def _grant_credit(self) -> None:
        """Gives free slots to the routers with the fewest tasks here.

        A router without a task has credit for an equal part of the slots, which takes no slot from the others.
        """
        slot_count = self._worker.slot_count
        sessions = [self._sessions[key] for key in self._streams if key in self._sessions]
        if len(self._streams) == 1:
            for session in sessions:
                session.grant(slot_count - session.granted)
            return
        part = max(1, slot_count // max(1, len(self._streams)))
        taken = sum(one.running + min(1, one.running, one.unused) for one in sessions)
        for session in sorted(sessions, key=lambda one: one.running):
            room = part - session.unused
            if session.running:
                room = min(room, slot_count - taken)
                taken += max(0, room)
            session.grant(room)

    async def _pull(self, key: RouterKey) -> None:
        router_id, _, endpoint = key
        retry_s = RETRY_S_MIN
        async with open_channel(endpoint, self._config) as channel:
            while not self._draining:
                session = PullSession(self._worker, self._hello, self._grant_credit)
                self._sessions[key] = session
                self._grant_credit()
                try:
                    await session.run(prefill_pb2_grpc.PrefillQueueServiceStub(channel))
                    log.info("router %s ended the pull stream", router_id)
                except grpc.aio.AioRpcError as rpc_error:
                    failure = error_from_rpc(rpc_error)
                    level = logging.INFO if isinstance(failure, Draining) else logging.WARNING
                    log.log(level, "pull from %s: %s", router_id, failure.detail)
                except QueueFull as error:
                    log.warning("pull from %s: %s", router_id, error.detail)
                finally:
                    if self._sessions.get(key) is session:
                        del self._sessions[key]
                    self._grant_credit()
                retry_s = RETRY_S_MIN if session.answered else min(RETRY_S_MAX, 2 * retry_s)
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
                await self._worker.wait_stepping()


def open_puller(hosted: HostedWorker[WorkerConfig], worker: PrefillWorker) -> TaskPuller:
    """Pulls tasks for a hosted worker, and follows the changes of its adapters."""
    config, engine = hosted.config, hosted.engine
    puller = TaskPuller(
        config,
        worker,
        model=served_model(config, engine),
        layout=layout_to_proto(engine.descriptor.layout),
    )
    puller.set_adapters(hosted.adapters.announced)
    hosted.adapters.follow(puller.set_adapters)
    return puller
