"""Decode and prefill workers on real gRPC that run scripts, and these scripts."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from headrace.inference.v1 import adapter_pb2, first_token_pb2, sampling_pb2
from headrace.prefill.v1 import prefill_pb2, prefill_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import time_model_pb2, worker_pb2, worker_pb2_grpc
from headrace_common.config import ServiceConfig
from headrace_common.errors import DecodeFull
from headrace_common.identity import new_incarnation
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import GrpcServer
from headrace_common.rpc.status import reported_error, status_of
from headrace_kv.layout import layout_to_proto
from tests.sim_layout import LAYOUT
from tests.waiting import forever, until

CONTEXT_TOKENS = 1_024

Event: TypeAlias = decode_pb2.Reserved | decode_pb2.Tokens | decode_pb2.Finished
Script = Callable[["FakeDecode", decode_pb2.GenerateRequest], AsyncIterator[Any]]


class Handoff:
    """Stands in for the data plane: an event per transfer, set when its KV cache is complete."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def of(self, transfer_id: str) -> asyncio.Event:
        return self._events.setdefault(transfer_id, asyncio.Event())


class ReadTokens:
    """Counts the tokens of all decode workers that the callers of this process have read.

    gRPC drops messages of a broken connection that the caller has not read. A fake worker waits for this count before
    it breaks the connection.
    """

    def __init__(self) -> None:
        self.count = 0

    def stub(self, channel: grpc.aio.Channel) -> Any:
        """Replaces the stub of DecodeService. It counts the tokens of every message that it returns."""
        stub: Any = _Stub(channel)
        stub.Link = channel.stream_stream(
            "/headrace.decode.v1.DecodeService/Link",
            request_serializer=decode_pb2.LinkRequest.SerializeToString,
            response_deserializer=self._read,
        )
        return stub

    def _read(self, payload: bytes) -> decode_pb2.LinkResponse:
        message = decode_pb2.LinkResponse.FromString(payload)
        self.count += len(message.tokens.token_ids)
        self.count += sum(len(one.tokens.token_ids) for one in message.tokens_with_logprobs)
        return message

    async def reach(self, count: int) -> None:
        """Waits until so many tokens have been read."""
        await until(lambda: self.count >= count, what=lambda: f"{self.count} of {count} tokens")


_Stub: Any = decode_pb2_grpc.DecodeServiceStub


class FakeLink:
    """The messages of one link. Tokens wait for credit."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[decode_pb2.LinkResponse | None] = asyncio.Queue()
        """None ends the link."""
        self._credit: defaultdict[int, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(0)
        )

    def grant(self, stream_id: int, tokens: int) -> None:
        for _ in range(tokens):
            self._credit[stream_id].release()

    async def send(self, stream_id: int, event: Event) -> None:
        if isinstance(event, decode_pb2.Tokens):
            for _ in event.token_ids:
                await self._credit[stream_id].acquire()
        self.messages.put_nowait(linked(stream_id, event))


class FakeDecode(decode_pb2_grpc.DecodeServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """A decode worker that runs `script` for each request."""

    def __init__(
        self,
        worker_id: str,
        handoff: Handoff,
        script: Script,
        read_tokens: ReadTokens | None = None,
    ) -> None:
        self.handoff = handoff
        self.read_tokens = read_tokens or ReadTokens()
        self.script = script
        self.requests: list[decode_pb2.GenerateRequest] = []
        self.first_tokens: list[decode_pb2.SetFirstTokenRequest] = []
        self.first_token_set = asyncio.Event()
        self.metadata: list[dict[str, Any]] = []
        self.cancelled: set[str] = set()
        self.links = 0
        """Links that were opened, in all."""
        self.token_intervals_us: list[int] = []
        """Those that routers asked for."""
        self._open_links: list[FakeLink] = []
        self.running_requests = 0
        self.reports = asyncio.Event()
        """Cleared by a test to stop the status stream."""
        self.reports.set()
        self.times: time_model_pb2.TimeModel | None = None
        """What it has learned."""
        self.stall: worker_pb2.Stall | None = None
        """What it reports of its engine."""
        self.clock_offset_s = 0.0
        """How far its wall clock is ahead."""
        self.hashing: worker_pb2.KvHashing | None = None
        """How it hashes cached prefixes. None: it does not support KV events."""
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
        self._server = GrpcServer(ServiceConfig(insecure=True), ())
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self._server.server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server.server)

    async def start(self) -> FakeDecode:
        self.member.endpoint = await self._server.start()
        return self

    def change_member(self, **fields: Any) -> None:
        """Registers other values, from the next refresh of the router on. A list replaces the former one.

        A registry's member never changes, so this is another object.
        """
        member = registry_pb2.Member.FromString(self.member.SerializeToString())
        for name in fields:
            member.ClearField(name)  # type: ignore[arg-type]
        member.MergeFrom(registry_pb2.Member(**fields))
        self.member = member

    async def kill(self) -> None:
        """Breaks every connection, as the death of the process does."""
        await self._server.stop(0)

    @property
    def open_links(self) -> int:
        return len(self._open_links)

    def end_links(self) -> None:
        """Ends every link, with the requests on it. The connection stays."""
        for link in self._open_links:
            link.messages.put_nowait(None)

    async def die(self) -> None:
        """Kills the worker from within a script, which never continues."""
        self.background.append(asyncio.create_task(self.kill()))
        await forever()

    async def Link(
        self, request_iterator: AsyncIterator[decode_pb2.LinkRequest], context: Any
    ) -> AsyncIterator[decode_pb2.LinkResponse]:
        """Runs the script for each open, within its credit. Every event is a message."""
        link = FakeLink()
        self._open_links.append(link)
        running: dict[int, asyncio.Task[None]] = {}
        self.links += 1

        async def read() -> None:
            async for request in request_iterator:
                for opened in request.opens:
                    link.grant(opened.stream_id, opened.credit_tokens)
                    running[opened.stream_id] = asyncio.create_task(self._answer(opened, link))
                if request.HasField("token_interval_us"):
                    self.token_intervals_us.append(request.token_interval_us)
                for credit in request.credits:
                    link.grant(credit.stream_id, credit.credit_tokens)
                for stream_id in request.cancelled_stream_ids:
                    running.pop(stream_id).cancel()

        reader = asyncio.create_task(read())
        try:
            while (message := await link.messages.get()) is not None:
                yield message
        finally:
            self._open_links.remove(link)
            for task in (reader, *running.values()):
                task.cancel()

    async def _answer(self, opened: decode_pb2.LinkOpen, link: FakeLink) -> None:
        stream_id, request = opened.stream_id, opened.request
        self.requests.append(request)
        self.metadata.append({"traceparent": opened.traceparent})
        try:
            async for event in self.script(self, request):
                await link.send(stream_id, event)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.add(request.transfer_id)
            raise
        except Exception as error:  # noqa: BLE001 - sent as the answer
            status = status_of(reported_error(error, "a script")).SerializeToString()
            failure = decode_pb2.LinkFailure(stream_id=stream_id, status=status)
            link.messages.put_nowait(decode_pb2.LinkResponse(failures=[failure]))

    async def SetFirstToken(
        self, request: decode_pb2.SetFirstTokenRequest, context: Any
    ) -> decode_pb2.SetFirstTokenResponse:
        self.first_tokens.append(request)
        self.first_token_set.set()
        return decode_pb2.SetFirstTokenResponse()

    async def SubscribeKvEvents(
        self, request: worker_pb2.SubscribeKvEventsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.SubscribeKvEventsResponse]:
        if self.hashing is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker has no KV events")
        while True:
            yield worker_pb2.SubscribeKvEventsResponse(
                incarnation=self.member.incarnation,
                tier=worker_pb2.KV_TIER_DEVICE,
                heartbeat=worker_pb2.KvHeartbeat(hashing=self.hashing),
            )
            await asyncio.sleep(0.05)

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
                times=self.times,
                stall=self.stall,
                sent_unix_ns=time.time_ns() + round(self.clock_offset_s * 1e9),
            )
            await asyncio.sleep(0.05)
            await self.reports.wait()


def linked(stream_id: int, event: Event) -> decode_pb2.LinkResponse:
    """The message of a link with one event."""
    message = decode_pb2.LinkResponse()
    match event:
        case decode_pb2.Reserved():
            message.reserved.add(stream_id=stream_id, reserved=event)
        case decode_pb2.Tokens() if event.logprobs:
            message.tokens_with_logprobs.add(stream_id=stream_id, tokens=event)
        case decode_pb2.Tokens():
            message.tokens.stream_ids.append(stream_id)
            message.tokens.token_counts.append(len(event.token_ids))
            message.tokens.token_ids.extend(event.token_ids)
        case decode_pb2.Finished():
            message.finished.add(stream_id=stream_id, finished=event)
    return message


def reserved(request: decode_pb2.GenerateRequest, start: int = 0) -> decode_pb2.Reserved:
    has_maker = request.first_token != first_token_pb2.FIRST_TOKEN_POLICY_UNSPECIFIED
    end = len(request.token_ids) - (0 if has_maker else 1) if request.remote_prefill else start
    return decode_pb2.Reserved(start_token=start, end_token=end)


def tokens(text: str) -> decode_pb2.Tokens:
    return decode_pb2.Tokens(token_ids=text.encode())


def finished(request: decode_pb2.GenerateRequest) -> decode_pb2.Finished:
    transferred = len(request.token_ids) - 1 if request.remote_prefill else 0
    return decode_pb2.Finished(
        reason=sampling_pb2.FINISH_REASON_LENGTH, transferred_tokens=transferred
    )


def reply(text: str, *, after_first_token: bool = False) -> Script:
    """Waits for the KV cache of a remote prefill, then sends `text`, one token per message.

    With `after_first_token` it waits for SetFirstToken, too.
    """

    async def script(
        worker: FakeDecode, request: decode_pb2.GenerateRequest
    ) -> AsyncIterator[Event]:
        yield reserved(request)
        if after_first_token:
            await worker.first_token_set.wait()
        if request.remote_prefill:
            await worker.handoff.of(request.transfer_id).wait()
        for letter in text:
            yield tokens(letter)
        yield finished(request)

    return script


def reject(error: Exception) -> Script:
    """Rejects every request with `error`, before Reserved."""

    async def script(
        worker: FakeDecode, request: decode_pb2.GenerateRequest
    ) -> AsyncIterator[Event]:
        raise error
        yield  # type: ignore[unreachable]

    return script


full = reject(DecodeFull("no room", retry_after_s=0.25))


async def hang(worker: FakeDecode, request: decode_pb2.GenerateRequest) -> AsyncIterator[Any]:
    yield reserved(request)
    await forever()


async def reserve_and_die(
    worker: FakeDecode, request: decode_pb2.GenerateRequest
) -> AsyncIterator[Event]:
    """Dies after Reserved."""
    yield reserved(request)
    await worker.die()


TEXT = "Grüße aus dem Süden, und gute Nacht."
TOKENS = TEXT.encode()
"""A completion that workers recite, each from wherever the request continues it."""


def recite(token_count: int, then: Callable[[FakeDecode], Awaitable[Any]] | None = None) -> Script:
    """Sends at most `token_count` tokens of the completion, then Finished or what `then` does."""

    async def script(worker: FakeDecode, request: decode_pb2.GenerateRequest) -> AsyncIterator[Any]:
        start = request.generated_token_count
        yield reserved(request)
        if request.remote_prefill:
            await worker.handoff.of(request.transfer_id).wait()
        earlier = worker.read_tokens.count
        recited = TOKENS[: request.sampling.max_tokens][start : start + token_count]
        for token in recited:
            logprob = sampling_pb2.TokenLogprobs(logprob=-token)
            logprobs = [logprob] if request.sampling.logprobs else []
            yield decode_pb2.Tokens(token_ids=[token], logprobs=logprobs)
        if then is not None:
            await worker.read_tokens.reach(earlier + len(recited))
            await then(worker)
        else:
            yield decode_pb2.Finished(
                reason=sampling_pb2.FINISH_REASON_LENGTH, cached_tokens=start + 3
            )

    return script


def raising(error: Exception) -> Callable[[FakeDecode], Awaitable[Any]]:
    """Ends the stream with `error`."""

    async def ending(worker: FakeDecode) -> None:
        raise error

    return ending


def sampling(**fields: Any) -> sampling_pb2.SamplingParams:
    """Parameters of a request for the whole completion."""
    return sampling_pb2.SamplingParams(max_tokens=len(TOKENS), **fields)


Behaviour = Callable[["FakePrefill", prefill_pb2.PrefillTask], Awaitable[None]]


class FakePrefill:
    """A prefill worker that pulls, and runs `behaviour` for each task."""

    def __init__(
        self,
        worker_id: str,
        handoff: Handoff,
        behaviour: Behaviour,
        *adapters: adapter_pb2.Adapter,
        incarnation: str = "",
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation or new_incarnation()
        self.handoff = handoff
        self.behaviour = behaviour
        self.tasks: list[prefill_pb2.PrefillTask] = []
        self.cancels: list[str] = []
        self.ended = asyncio.Event()
        self.error: grpc.aio.AioRpcError | None = None
        self.hello = prefill_pb2.PullRequest(
            hello=prefill_pb2.Hello(
                worker_id=worker_id,
                incarnation=self.incarnation,
                model="sim",
                layout=layout_to_proto(LAYOUT),
                adapters=adapters,
            )
        )
        self._running: set[asyncio.Task[None]] = set()
        # gRPC writes one message at a time.
        self._writing = asyncio.Lock()

    async def start(self, endpoint: str, credit: int = 4) -> FakePrefill:
        self._channel = open_channel(endpoint)
        self._call: Any = prefill_pb2_grpc.PrefillQueueServiceStub(self._channel).Pull()
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
        done = prefill_pb2.TaskDone(transfer_id=transfer_id, reason=reason, detail=detail)
        await self.send(prefill_pb2.PullRequest(done=done))

    async def started(self, transfer_id: str) -> None:
        started = prefill_pb2.TaskStarted(transfer_id=transfer_id)
        await self.send(prefill_pb2.PullRequest(started=started))

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


def send_first_token(token: str | int, then: Behaviour = hand_over) -> Behaviour:
    """Starts the task, sends its first token, and continues with `then`."""

    async def behaviour(worker: FakePrefill, task: prefill_pb2.PrefillTask) -> None:
        await worker.started(task.transfer_id)
        token_id = ord(token) if isinstance(token, str) else token
        first = prefill_pb2.FirstToken(transfer_id=task.transfer_id, token_id=token_id)
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
