"""Scripted decode and prefill workers on real gRPC, and a router between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.inference.v1 import (
    first_token_pb2,
    inference_pb2,
    inference_pb2_grpc,
    sampling_pb2,
)
from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.config import ServiceConfig
from headrace_common.errors import DecodeFull
from headrace_common.identity import new_incarnation
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import GrpcServer
from headrace_common.telemetry.setup import Telemetry, init_telemetry
from headrace_kv.layout.layout import KvLayout
from headrace_kv.layout.proto import layout_to_proto
from headrace_router.app import SERVICES, Router, assemble
from headrace_router.config import RouterConfig
from headrace_text.byte_codec import ByteCodec

LAYOUT = KvLayout.attention(
    model="sim", dtype="float32", layer_count=4, kv_head_count=2, block_tokens=16, parts={"kv": 64}
)
CONTEXT_TOKENS = 1_024
PREFIX_KEY = 1
TICKET_KEY = bytes(range(32))


async def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Waits until `condition` holds; fails the test when it never does."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


class Handoff:
    """Stands in for the data plane: which transfers are whole."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def of(self, transfer_id: str) -> asyncio.Event:
        return self._events.setdefault(transfer_id, asyncio.Event())


Script = Callable[["FakeDecode", decode_pb2.GenerateRequest], AsyncIterator[Any]]


class FakeDecode(decode_pb2_grpc.DecodeServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """A decode worker that follows `script`."""

    def __init__(self, worker_id: str, handoff: Handoff, script: Script) -> None:
        self.handoff = handoff
        self.script = script
        self.requests: list[decode_pb2.GenerateRequest] = []
        self.first_tokens: list[decode_pb2.SetFirstTokenRequest] = []
        self.told = asyncio.Event()
        self.metadata: list[dict[str, Any]] = []
        self.cancelled: set[str] = set()
        self.running_requests = 0
        self.reports = asyncio.Event()
        """Clear while it says nothing of itself."""
        self.reports.set()
        self.hashing: worker_pb2.KvHashing | None = None
        """How it names cached prefixes; None makes it one that does not say what it caches."""
        self.background: list[asyncio.Task[None]] = []
        self.member = registry_pb2.Member(
            worker_id=worker_id,
            incarnation=new_incarnation(),
            role=registry_pb2.Member.ROLE_DECODE,
            model="sim",
            max_model_len=CONTEXT_TOKENS,
            layout=layout_to_proto(LAYOUT),
            max_num_seqs=8,
            start_unix_ns=time.time_ns(),
        )
        self._server = GrpcServer(ServiceConfig(), ())
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self._server.server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server.server)

    async def start(self) -> FakeDecode:
        self.member.endpoint = await self._server.start()
        return self

    async def kill(self) -> None:
        """Ends the process, as it were: every connection breaks."""
        await self._server.server.stop(0)

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            async for event in self.script(self, request):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.add(request.transfer_id)
            raise

    async def SetFirstToken(
        self, request: decode_pb2.SetFirstTokenRequest, context: Any
    ) -> decode_pb2.SetFirstTokenResponse:
        self.first_tokens.append(request)
        self.told.set()
        return decode_pb2.SetFirstTokenResponse()

    async def SubscribeKvEvents(
        self, request: worker_pb2.SubscribeKvEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.SubscribeKvEventsResponse]:
        if self.hashing is None:
            await context.abort(
                grpc.StatusCode.UNIMPLEMENTED, "this worker does not say what it caches"
            )
        while True:
            yield worker_pb2.SubscribeKvEventsResponse(
                incarnation=self.member.incarnation,
                tier=worker_pb2.KV_TIER_DEVICE,
                heartbeat=worker_pb2.KvHeartbeat(hashing=self.hashing),
            )
            await asyncio.sleep(0.05)

    async def ResetPrefixCache(
        self, request: worker_pb2.ResetPrefixCacheRequest, context: Any
    ) -> worker_pb2.ResetPrefixCacheResponse:
        return worker_pb2.ResetPrefixCacheResponse()

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Any
    ) -> worker_pb2.DrainResponse:
        raise AssertionError("routers drain no workers")

    async def WatchStatus(
        self, request: worker_pb2.WatchStatusRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchStatusResponse]:
        while True:
            yield worker_pb2.WatchStatusResponse(
                worker_id=self.member.worker_id,
                incarnation=self.member.incarnation,
                state=worker_pb2.WatchStatusResponse.STATE_SERVING,
                running_requests=self.running_requests,
                total_blocks=100,
            )
            await asyncio.sleep(0.05)
            await self.reports.wait()


def reserved(request: decode_pb2.GenerateRequest, start: int = 0) -> decode_pb2.GenerateResponse:
    told = request.first_token != first_token_pb2.FIRST_TOKEN_POLICY_UNSPECIFIED
    end = len(request.token_ids) - (0 if told else 1) if request.remote_prefill else start
    return decode_pb2.GenerateResponse(
        reserved=decode_pb2.Reserved(start_token=start, end_token=end)
    )


def tokens(text: str) -> decode_pb2.GenerateResponse:
    return decode_pb2.GenerateResponse(tokens=decode_pb2.Tokens(token_ids=text.encode()))


def finished(request: decode_pb2.GenerateRequest) -> decode_pb2.GenerateResponse:
    transferred = len(request.token_ids) - 1 if request.remote_prefill else 0
    return decode_pb2.GenerateResponse(
        finished=decode_pb2.Finished(
            reason=sampling_pb2.FINISH_REASON_LENGTH, transferred_tokens=transferred
        )
    )


def say(text: str) -> Script:
    """Waits for the KV cache if it is to come, then says `text`, a token at a time."""

    async def script(
        worker: FakeDecode, request: decode_pb2.GenerateRequest
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        yield reserved(request)
        if request.remote_prefill:
            await worker.handoff.of(request.transfer_id).wait()
        for letter in text:
            yield tokens(letter)
        yield finished(request)

    return script


def go_on(text: str) -> Script:
    """As `say`, after the first token that it is told."""

    async def script(
        worker: FakeDecode, request: decode_pb2.GenerateRequest
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        yield reserved(request)
        await worker.told.wait()
        await worker.handoff.of(request.transfer_id).wait()
        for letter in text:
            yield tokens(letter)
        yield finished(request)

    return script


async def full(worker: FakeDecode, request: decode_pb2.GenerateRequest) -> AsyncIterator[Any]:
    raise DecodeFull("no room", retry_after_s=0.25)
    yield  # type: ignore[unreachable]


async def hang(worker: FakeDecode, request: decode_pb2.GenerateRequest) -> AsyncIterator[Any]:
    yield reserved(request)
    await asyncio.sleep(60)


def die_after(text: str) -> Script:
    """Says `text`, then the process dies."""

    async def script(
        worker: FakeDecode, request: decode_pb2.GenerateRequest
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        yield reserved(request)
        if text:
            if request.remote_prefill:
                await worker.handoff.of(request.transfer_id).wait()
            yield tokens(text)
            await asyncio.sleep(0.1)
        worker.background.append(asyncio.create_task(worker.kill()))
        await asyncio.sleep(60)

    return script


Behaviour = Callable[["FakePrefill", prefill_pb2.PrefillTask], Awaitable[None]]


class FakePrefill:
    """A prefill worker that pulls and follows `behaviour`."""

    def __init__(
        self, worker_id: str, handoff: Handoff, behaviour: Behaviour, layout: KvLayout = LAYOUT
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = new_incarnation()
        self.handoff = handoff
        self.behaviour = behaviour
        self.layout = layout
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
                    layout=layout_to_proto(self.layout),
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
        """Breaks the stream, as a killed process does."""
        self._call.cancel()

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


def begin_answer(letter: str, then: Behaviour = hand_over) -> Behaviour:
    """Says the first token, and goes on with the task."""

    async def behaviour(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
        await worker.started(task.transfer_id)
        first = prefill_pb2.FirstToken(transfer_id=task.transfer_id, token_id=ord(letter))
        await worker.send(prefill_pb2.PullRequest(first_token=first))
        await then(worker, task)

    return behaviour


def refuse(reason: str) -> Behaviour:
    """Turns the task down without having begun it."""

    async def behaviour(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
        await worker.done(task.transfer_id, reason, "as scripted")

    return behaviour


async def start_and_die(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
    await worker.started(task.transfer_id)
    await asyncio.sleep(0.05)
    await worker.die()


def fail(reason: str) -> Behaviour:
    """Begins the task, and fails."""

    async def behaviour(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
        await worker.started(task.transfer_id)
        await worker.done(task.transfer_id, reason, "as scripted")
        await worker.give_credit(1)

    return behaviour


async def die(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
    await worker.die()


async def stall(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
    return None


@dataclass
class FixedPolicy:
    """The run-time policy that a test sets."""

    policy: registry_pb2.Policy = field(default_factory=registry_pb2.Policy)


class Rig:
    """A router on a real port, with the workers that a test adds."""

    def __init__(self, **settings: Any) -> None:
        self.config = RouterConfig(model=("sim",), **{"worker_wait_s": 0.2, **settings})
        self.handoff = Handoff()
        self.policy = FixedPolicy()
        self.decodes: list[FakeDecode] = []
        self.prefills: list[FakePrefill] = []

    async def start(self) -> Rig:
        self.telemetry: Telemetry = init_telemetry("router", "router-0", self.config)
        self.router: Router = assemble(
            self.config,
            {"sim": ByteCodec()},
            self.telemetry,
            self.policy,
            lambda: PREFIX_KEY,
            lambda: TICKET_KEY,
        )
        self._server = GrpcServer(self.config, SERVICES)
        self.router.add_to(self._server.server)
        self.endpoint = await self._server.start()
        self.channel = open_channel(self.endpoint)
        self.stub: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)
        return self

    async def add_decode(
        self, script: Script, hashing: worker_pb2.KvHashing | None = None
    ) -> FakeDecode:
        worker = await FakeDecode(f"d{len(self.decodes)}", self.handoff, script).start()
        worker.hashing = hashing
        self.decodes.append(worker)
        self.refresh()
        known = {other.ref.worker_id for other in self.router.workers.table("sim").workers}
        assert worker.member.worker_id in known
        await eventually(lambda: bool(self.router.workers.table("sim").reachable.all()))
        return worker

    async def loads_known(self) -> None:
        """Until the router has heard how many requests each decode worker says it runs."""
        told = {worker.member.worker_id: worker.running_requests for worker in self.decodes}

        def heard() -> bool:
            table = self.router.workers.table("sim")
            loads = zip(table.workers, table.requests, table.reachable, strict=True)
            return told == {one.ref.worker_id: int(n) for one, n, known in loads if known}

        await eventually(heard)

    def refresh(self) -> None:
        self.router.update([worker.member for worker in self.decodes])

    async def add_prefill(
        self, behaviour: Behaviour, credit: int = 4, layout: KvLayout = LAYOUT
    ) -> FakePrefill:
        worker = FakePrefill(f"p{len(self.prefills)}", self.handoff, behaviour, layout)
        await worker.start(self.endpoint, credit)
        self.prefills.append(worker)
        await eventually(lambda: worker.worker_id in self.pulling())
        return worker

    def pulling(self) -> set[str]:
        """Ids of the prefill workers that the queue may hand tasks to."""
        return {ref.worker_id for refs in self.router.queue.partners().values() for ref in refs}

    async def ask(
        self, text: str = "a prompt", timeout_s: float = 10.0, **fields: Any
    ) -> list[inference_pb2.GenerateResponse]:
        """Every message of the answer."""
        request = inference_pb2.GenerateRequest(text=text, **fields)
        return [response async for response in self.stub.Generate(request, timeout=timeout_s)]

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.prefills))
        await self.channel.close()
        await self._server.server.stop(0)
        await self.router.close()
        for worker in self.decodes:
            await asyncio.gather(*worker.background)
            await worker.kill()
        await asyncio.to_thread(self.telemetry.shutdown)


def text_of(responses: list[inference_pb2.GenerateResponse]) -> str:
    return "".join(response.text for response in responses)
