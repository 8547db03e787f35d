"""A scripted prefill worker on real gRPC, and behaviours for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace_common.identity import new_incarnation
from headrace_common.rpc.channel import open_channel
from headrace_kv.layout import layout_to_proto
from tests.component.router.fakes.handoff import Handoff
from tests.sim_layout import LAYOUT

Behaviour = Callable[["FakePrefill", prefill_pb2.PrefillTask], Awaitable[None]]


class FakePrefill:
    """A prefill worker that pulls, and runs `behaviour` for each task."""

    def __init__(self, worker_id: str, handoff: Handoff, behaviour: Behaviour) -> None:
        self.worker_id = worker_id
        self.incarnation = new_incarnation()
        self.handoff = handoff
        self.behaviour = behaviour
        self.tasks: list[prefill_pb2.PrefillTask] = []
        self.cancels: list[str] = []
        self.ended = asyncio.Event()
        self.error: grpc.aio.AioRpcError | None = None
        self.hello = prefill_pb2.PullRequest()
        self._running: set[asyncio.Task[None]] = set()
        # gRPC writes one message at a time.
        self._writing = asyncio.Lock()

    async def start(self, endpoint: str, credit: int = 4) -> FakePrefill:
        self._channel = open_channel(endpoint)
        self._call: Any = prefill_pb2_grpc.PrefillQueueServiceStub(self._channel).Pull()
        if not self.hello.ByteSize():
            self.hello.hello.CopyFrom(
                prefill_pb2.Hello(
                    worker_id=self.worker_id,
                    incarnation=self.incarnation,
                    model="sim",
                    layout=layout_to_proto(LAYOUT),
                )
            )
        await self.send(self.hello)
        if credit:
            await self.give_credit(credit)
        self._reader = asyncio.create_task(self._read())
        return self

    async def send(self, request: prefill_pb2.PullRequest) -> None:
        async with self._writing:
            await self._call.write(request)

    async def give_credit(self, count: int) -> None:
        await self.send(prefill_pb2.PullRequest(credit=prefill_pb2.Credit(task_count=count)))

    async def done(self, transfer_id: str, reason: str = "", detail: str = "") -> None:
        await self.send(
            prefill_pb2.PullRequest(
                done=prefill_pb2.TaskDone(transfer_id=transfer_id, reason=reason, detail=detail)
            )
        )

    async def started(self, transfer_id: str) -> None:
        await self.send(
            prefill_pb2.PullRequest(started=prefill_pb2.TaskStarted(transfer_id=transfer_id))
        )

    async def die(self) -> None:
        """Breaks the stream, as the death of the process does."""
        self._call.cancel()

    async def end(self) -> None:
        """Ends the stream after the messages that were sent. The router reads them all."""
        async with self._writing:
            await self._call.done_writing()

    async def close(self) -> None:
        for task in (*self._running, self._reader):
            task.cancel()
        await asyncio.gather(*self._running, self._reader, return_exceptions=True)
        await self._channel.close()

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if message.HasField("cancel"):
                    self.cancels.append(message.cancel.transfer_id)
                    continue
                self.tasks.append(message.task)
                running = asyncio.ensure_future(self.behaviour(self, message.task))
                self._running.add(running)
        except grpc.aio.AioRpcError as error:
            self.error = error
        finally:
            self.ended.set()


async def hand_over(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
    worker.handoff.of(task.transfer_id).set()
    await worker.done(task.transfer_id)
    await worker.give_credit(1)


def send_first_token(letter: str, then: Behaviour = hand_over) -> Behaviour:
    """Starts the task, sends its first token, and continues with `then`."""

    async def behaviour(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
        await worker.started(task.transfer_id)
        first = prefill_pb2.FirstToken(transfer_id=task.transfer_id, token_id=ord(letter))
        await worker.send(prefill_pb2.PullRequest(first_token=first))
        await then(worker, task)

    return behaviour


def refuse(reason: str) -> Behaviour:
    """Rejects the task before it has started."""

    async def behaviour(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
        await worker.done(task.transfer_id, reason, "as scripted")

    return behaviour


async def start_and_end(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
    await worker.started(task.transfer_id)
    await worker.end()


def fail(reason: str) -> Behaviour:
    """Starts the task, then fails."""

    async def behaviour(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
        await worker.started(task.transfer_id)
        await worker.done(task.transfer_id, reason, "as scripted")
        await worker.give_credit(1)

    return behaviour


async def die(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
    await worker.die()


async def stall(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
    return None
