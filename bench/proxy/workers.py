"""Workers that only send 64 tokens: one for each protocol, as cheap as Python allows.

    python -m bench.proxy.workers REGISTRY HTTP_PORT

gRPC: a decode worker that joins the registry and sends each token as a message. HTTP: an OpenAI-style server that
sends each token as a server-sent event in a chunk and a write of its own. The request selects the gap between tokens:
max_tokens = TOKENS + the gap in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import grpc.aio
import httptools
import uvloop

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.config import ServiceConfig
from headrace_common.identity import new_incarnation
from headrace_common.process.pacing import GAP_MIN_S, JOIN_S
from headrace_common.registry.membership import Membership
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import GrpcServer
from headrace_kv.layout import KvLayout, layout_to_proto

TOKENS: Final = 64
MODEL: Final = "sim"
_STATUS_INTERVAL_S: Final = 0.5
_LAYOUT: Final = KvLayout.attention(
    model=MODEL, dtype="float32", layer_count=2, kv_head_count=2, block_tokens=16, parts={"kv": 64}
)


def token_of(index: int) -> int:
    """A word, in the simulated model and in the real ones."""
    return 300 + index


async def beats(gap_s: float) -> AsyncIterator[int]:
    """Yields the index of each token when it is due."""
    due_s = time.perf_counter()
    for index in range(TOKENS):
        yield index
        due_s += gap_s
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()) if gap_s else 0)


class Steps:
    """The requests of one link with the same gap. As in an engine, each step gives all of them a token.

    As a decode worker does, it sends first tokens and ends without a pause, and other tokens once in `interval_s()`.
    """

    def __init__(
        self,
        gap_s: float,
        send: Callable[[decode_pb2.LinkResponse], None],
        interval_s: Callable[[], float],
    ) -> None:
        self._gap_s = gap_s
        self._send = send
        self._interval_s = interval_s
        self._made: dict[int, int] = {}
        """The tokens of each request so far."""
        self._sent: dict[int, int] = {}
        self._due_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def add(self, stream_id: int) -> None:
        """Starts a request."""
        self._made[stream_id] = self._sent[stream_id] = 0
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        due_s = time.perf_counter()
        while self._made:
            self._step()
            due_s += self._gap_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()) if self._gap_s else 0)
        self._task = None

    def _step(self) -> None:
        made, sent = self._made, self._sent
        ended = [stream_id for stream_id, count in made.items() if count == TOKENS]
        for stream_id in ended:
            del made[stream_id]
        for stream_id in made:
            made[stream_id] += 1
        now_s = time.perf_counter()
        if now_s >= self._due_s:
            # Steps come a moment early or late.
            self._due_s = now_s + self._interval_s() - self._gap_s / 2
            urgent = list(made)
        else:
            urgent = [stream_id for stream_id, count in made.items() if count == 1]
        message = decode_pb2.LinkResponse()
        for stream_id, end in [
            *((one, TOKENS) for one in ended),
            *((one, made[one]) for one in urgent),
        ]:
            start = sent[stream_id]
            if start < end:
                message.tokens.stream_ids.append(stream_id)
                message.tokens.token_counts.append(end - start)
                message.tokens.token_ids.extend(range(token_of(start), token_of(end)))
                sent[stream_id] = end
        for stream_id in ended:
            del sent[stream_id]
            message.finished.add(
                stream_id=stream_id
            ).finished.reason = sampling_pb2.FINISH_REASON_LENGTH
        if ended or urgent:
            self._send(message)


class StepWorker:
    """Answers the opens of one link. As at a decode worker, steps join while the router is busy."""

    def __init__(self) -> None:
        self._pending: list[decode_pb2.LinkResponse] = []
        self._wake = asyncio.Event()
        self._engines: dict[float, Steps] = {}
        self._interval_s = 0.0

    def receive(self, request: decode_pb2.LinkRequest) -> None:
        """Starts the requests of a message. Credit is never short for so few tokens."""
        if request.HasField("token_interval_us"):
            self._interval_s = request.token_interval_us / 1e6
        for opened in request.opens:
            reserved = decode_pb2.LinkReserved(stream_id=opened.stream_id)
            self._send(decode_pb2.LinkResponse(reserved=[reserved]))
            gap_s = (opened.request.sampling.max_tokens - TOKENS) / 1e3
            if gap_s not in self._engines:
                self._engines[gap_s] = Steps(gap_s, self._send, lambda: self._interval_s)
            self._engines[gap_s].add(opened.stream_id)

    async def next_message(self) -> decode_pb2.LinkResponse:
        """Everything since the last message."""
        await self._wake.wait()
        if self._interval_s > GAP_MIN_S:
            await asyncio.sleep(JOIN_S)
        self._wake.clear()
        message, *others = self._pending
        self._pending = []
        for other in others:
            message.MergeFrom(other)
        return message

    def _send(self, message: decode_pb2.LinkResponse) -> None:
        self._pending.append(message)
        self._wake.set()


async def link(requests: AsyncIterator[decode_pb2.LinkRequest], context: Any) -> None:
    """DecodeService.Link, with one message for each step."""
    worker = StepWorker()

    async def read() -> None:
        async for request in requests:
            worker.receive(request)

    reader = asyncio.create_task(read())
    try:
        while True:
            await context.write(await worker.next_message())
    finally:
        reader.cancel()


class Status(worker_pb2_grpc.WorkerServiceServicer):
    """Sends a status now and then."""

    def __init__(self, member: registry_pb2.Member) -> None:
        self._member = member

    async def WatchStatus(  # noqa: N802 - the RPC's name
        self, request: worker_pb2.WatchStatusRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchStatusResponse]:
        """See worker.proto."""
        while True:
            yield worker_pb2.WatchStatusResponse(
                worker_id=self._member.worker_id,
                incarnation=self._member.incarnation,
                state=worker_pb2.WatchStatusResponse.STATE_SERVING,
                total_blocks=1_000_000,
                sent_unix_ns=time.time_ns(),
            )
            await asyncio.sleep(_STATUS_INTERVAL_S)

    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Reports an empty prefix cache."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker caches nothing")

    async def ResetPrefixCache(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Has no cache to reset."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker caches nothing")

    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Refuses, because the benchmark ends the worker."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker cannot be drained")

    async def ChangeAdapter(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Has no adapters."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker changes no adapters")


async def serve_grpc(registry: str) -> tuple[GrpcServer, Membership]:
    """Starts the decode worker."""
    member = registry_pb2.Member(
        worker_id="decode-0",
        incarnation=new_incarnation(),
        role=registry_pb2.Member.ROLE_DECODE,
        model=MODEL,
        max_model_len=8_192,
        layout=layout_to_proto(_LAYOUT),
        max_num_seqs=10_000,
        start_unix_ns=time.time_ns(),
    )
    # Without the interceptors of a real worker.
    server = GrpcServer(ServiceConfig(insecure=True), ())
    server.server = grpc.aio.server()
    links: Any = grpc.stream_stream_rpc_method_handler(
        link,
        request_deserializer=decode_pb2.LinkRequest.FromString,
        response_serializer=decode_pb2.LinkResponse.SerializeToString,
    )
    server.server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("headrace.decode.v1.DecodeService", {"Link": links}),)
    )
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Status(member), server.server)
    port = server.server.add_insecure_port("127.0.0.1:0")
    await server.server.start()
    member.endpoint = member.client_endpoint = f"127.0.0.1:{port}"
    # The channel ends with the process.
    channel = open_channel(registry, Credentials(role=Role.DECODE))
    membership = Membership(channel, member)
    await membership.start()
    return server, membership


def _event(index: int) -> bytes:
    content = {
        "id": "r",
        "object": "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "text": chr(97 + index % 26), "finish_reason": None}],
    }
    data = b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


_EVENTS: Final = tuple(_event(index) for index in range(TOKENS))
_END: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


class HttpWorker(asyncio.Protocol):
    """One connection of the OpenAI-style server."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._url = b""
        self._body = b""
        self._streams: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        """See httptools."""
        self._url = self._body = b""

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answers a completion with a stream, and any other request as a server with one model."""
        if b"completions" not in self._url:
            listed = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "x"}]}
            content = json.dumps(listed).encode()
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(content), content)
            )
            return
        gap_s = (json.loads(self._body)["max_tokens"] - TOKENS) / 1e3
        task = asyncio.ensure_future(self._stream(gap_s))
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)

    async def _stream(self, gap_s: float) -> None:
        self._transport.write(_HEAD)
        async for index in beats(gap_s):
            if self._transport.is_closing():
                return
            self._transport.write(_EVENTS[index])
        self._transport.write(_END)


async def main(registry: str, port: int) -> None:
    """Serves until the process is ended."""
    loop = asyncio.get_running_loop()
    _kept = await serve_grpc(registry)
    # The last step, so that a connection means that everything has started.
    await loop.create_server(HttpWorker, "127.0.0.1", port, backlog=1024)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
