"""The puller against real servers of PrefillQueueService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import pytest

from headrace.inference.v1 import sampling_pb2
from headrace.kv.v1 import layout_pb2
from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace_common.config import ServiceConfig
from headrace_common.deadlines import Deadline
from headrace_common.time_model.model import TimeModel
from headrace_engine.steps import Stall
from headrace_kv.layout import WorkerRef
from headrace_prefill.pull import TaskPuller
from tests.waiting import PATIENCE_S, let_a_wrong_step_show, until

REF = WorkerRef("prefill-0", "00112233445566ff")
LAYOUT = layout_pb2.KvLayout(model="m", tensor_parallel_size=2)


class ScriptedWorker:
    """A PrefillWorker with tasks that last until the test ends them."""

    def __init__(self) -> None:
        self.ref = REF
        self.slot_count = 4
        self.model = TimeModel()
        self.running: dict[str, asyncio.Event] = {}
        self.cancelled: list[str] = []
        self.stalled: Stall | None = None
        self.steps = asyncio.Event()

    def times(self, decode_worker_id: str) -> TimeModel:
        return self.model

    def stall(self) -> Stall | None:
        return self.stalled

    def cancel_part(self, transfer_id: str) -> None:
        """It has no parts."""

    async def wait_stepping(self) -> None:
        if self.stalled:
            await self.steps.wait()

    def start_drain(self) -> None:
        """Tasks end as the test says."""

    async def run(
        self,
        task: prefill_pb2.PrefillTask,
        on_start: Callable[[], Awaitable[None]],
        on_first_token: Callable[[prefill_pb2.FirstToken], None],
    ) -> prefill_pb2.TaskDone:
        done = prefill_pb2.TaskDone(transfer_id=task.transfer_id)
        await on_start()
        if task.HasField("sampling"):
            on_first_token(prefill_pb2.FirstToken(transfer_id=task.transfer_id, token_id=7))
        self.running[task.transfer_id] = asyncio.Event()
        try:
            await self.running[task.transfer_id].wait()
        except asyncio.CancelledError:
            self.cancelled.append(task.transfer_id)
            done.reason = "CANCELLED"
        finally:
            del self.running[task.transfer_id]
        return done


class RouterQueue(prefill_pb2_grpc.PrefillQueueServiceServicer):
    """Sends the tasks of a test, and records the messages of the worker."""

    def __init__(self) -> None:
        self.hellos: list[prefill_pb2.Hello] = []
        self.credit = 0
        self.signs_of_life = 0
        self.ended = 0
        self.done: list[prefill_pb2.TaskDone] = []
        self.first_tokens: list[prefill_pb2.FirstToken] = []
        self.started: list[str] = []
        self.outgoing: asyncio.Queue[prefill_pb2.PullResponse] = asyncio.Queue()

    async def Enqueue(self, request: object, context: object) -> prefill_pb2.EnqueueResponse:
        raise AssertionError("prefill workers queue no prompts")

    async def Pull(
        self, request_iterator: AsyncIterator[prefill_pb2.PullRequest], context: object
    ) -> AsyncIterator[prefill_pb2.PullResponse]:
        self.credit = 0
        recording = asyncio.create_task(self._record(request_iterator))
        try:
            while True:
                yield await self.outgoing.get()
        finally:
            self.ended += 1
            recording.cancel()

    async def _record(self, requests: AsyncIterator[prefill_pb2.PullRequest]) -> None:
        async for request in requests:
            self._record_one(request)

    def _record_one(self, request: prefill_pb2.PullRequest) -> None:
        for each in request.batch.requests:
            self._record_one(each)
        match request.WhichOneof("message"):
            case "hello":
                self.hellos.append(request.hello)
            case "credit":
                self.credit += request.credit.task_count
                self.signs_of_life += request.credit.task_count == 0
            case "started":
                self.started.append(request.started.transfer_id)
            case "first_token":
                self.first_tokens.append(request.first_token)
            case "done":
                self.done.append(request.done)

    def send_task(self, name: str, **fields: Any) -> None:
        self.credit -= 1
        task = prefill_pb2.PrefillTask(transfer_id=name, token_ids=[1, 2], **fields)
        self.outgoing.put_nowait(prefill_pb2.PullResponse(task=task))

    def cancel(self, name: str) -> None:
        cancel = prefill_pb2.CancelTask(transfer_id=name)
        self.outgoing.put_nowait(prefill_pb2.PullResponse(cancel=cancel))


class ServedRouter:
    """A RouterQueue on a port."""

    def __init__(self) -> None:
        self.queue = RouterQueue()
        self.port = 0

    async def start(self) -> None:
        self.server = grpc.aio.server()
        prefill_pb2_grpc.add_PrefillQueueServiceServicer_to_server(self.queue, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    def member(self, name: str, incarnation: str = "a" * 16) -> registry_pb2.Member:
        return registry_pb2.Member(
            worker_id=name, incarnation=incarnation, endpoint=f"127.0.0.1:{self.port}"
        )


@pytest.fixture
async def routers() -> AsyncIterator[list[ServedRouter]]:
    served = [ServedRouter(), ServedRouter()]
    for router in served:
        await router.start()
    yield served
    for router in served:
        await router.server.stop(None)


@pytest.fixture
async def worker() -> ScriptedWorker:
    return ScriptedWorker()


@pytest.fixture
async def puller(worker: ScriptedWorker) -> AsyncIterator[TaskPuller]:
    puller = TaskPuller(ServiceConfig(), worker, model="m", layout=LAYOUT)  # type: ignore[arg-type]
    yield puller
    await puller.close()


@pytest.fixture
async def queue(puller: TaskPuller, routers: list[ServedRouter]) -> RouterQueue:
    """The queue of the puller's only router, after the router has received the credit of every slot."""
    puller.set_routers([routers[0].member("r0")])
    queue = routers[0].queue
    await until(lambda: queue.credit == 4, what="credit")
    return queue


async def start_task(queue: RouterQueue, worker: ScriptedWorker) -> None:
    queue.send_task("x1")
    await until(lambda: "x1" in worker.running, what="the task")


async def test_a_first_token_is_reported_while_the_task_runs(
    queue: RouterQueue, worker: ScriptedWorker
) -> None:
    queue.send_task("x1", sampling=sampling_pb2.SamplingParams(max_tokens=4))
    await until(lambda: bool(queue.first_tokens), what="the token")
    assert queue.first_tokens == [prefill_pb2.FirstToken(transfer_id="x1", token_id=7)]
    assert queue.started == ["x1"]
    assert not queue.done
    worker.running["x1"].set()


async def test_a_cancelled_task_is_reported_too(queue: RouterQueue, worker: ScriptedWorker) -> None:
    await start_task(queue, worker)
    queue.cancel("x1")
    queue.cancel("unknown")
    await until(lambda: len(queue.done) == 1, what="its end")
    assert queue.done[0].reason == "CANCELLED"


async def test_a_stalled_engine_ends_its_streams_until_it_steps(
    puller: TaskPuller, routers: list[ServedRouter], worker: ScriptedWorker
) -> None:
    router = routers[0]
    puller.set_routers([router.member("r0")])
    await start_task(router.queue, worker)
    worker.stalled = Stall(6.0, 5.0, 1, 1)
    await until(lambda: worker.cancelled == ["x1"], what="the task to be stopped")
    await until(lambda: router.queue.ended == 1, what="the end of the stream")
    router.queue.credit = 0
    worker.stalled = None
    worker.steps.set()
    await until(lambda: router.queue.credit == 4, what="credit anew")


async def test_tasks_are_pulled_from_a_restarted_router(
    puller: TaskPuller, routers: list[ServedRouter], worker: ScriptedWorker
) -> None:
    router = routers[0]
    puller.set_routers([router.member("r0")])
    await start_task(router.queue, worker)
    await router.server.stop(None)
    await until(lambda: worker.cancelled == ["x1"], what="the task to be stopped")
    router.queue = RouterQueue()
    await router.start()
    await until(lambda: router.queue.credit == 4, what="credit anew")


async def test_a_drain_refuses_new_tasks_and_waits_for_running_ones(
    puller: TaskPuller, queue: RouterQueue, worker: ScriptedWorker
) -> None:
    await start_task(queue, worker)
    draining = asyncio.create_task(puller.drain(Deadline.after(60.0)))
    await let_a_wrong_step_show()
    queue.send_task("x2")
    await until(lambda: len(queue.done) == 1, what="the refusal")
    assert (queue.done[0].transfer_id, queue.done[0].reason) == ("x2", "DRAINING")
    assert not draining.done()
    worker.running["x1"].set()
    await asyncio.wait_for(draining, PATIENCE_S)
    await until(lambda: len(queue.done) == 2, what="the last report")
    assert queue.credit == 2


async def test_tasks_are_cancelled_and_reported_at_the_drain_deadline(
    puller: TaskPuller, queue: RouterQueue, worker: ScriptedWorker
) -> None:
    await start_task(queue, worker)
    await asyncio.wait_for(puller.drain(Deadline.after(0.1)), PATIENCE_S)
    assert worker.cancelled == ["x1"]
    await until(lambda: [done.transfer_id for done in queue.done] == ["x1"], what="the report")


async def test_a_task_beyond_the_credit_is_refused(
    queue: RouterQueue, worker: ScriptedWorker
) -> None:
    for number in range(5):
        queue.send_task(f"x{number}")
    await until(lambda: len(queue.done) == 1, what="the refusal")
    assert queue.done[0].reason == "QUEUE_FULL"
    await until(lambda: len(worker.running) == 4, what="four tasks")
