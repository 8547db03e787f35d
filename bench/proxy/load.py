"""Closed-loop load over gRPC and over HTTP: each stream sends its next request as soon as it has an answer."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.proxy.workers import MODEL, TOKENS
from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.identity import new_transfer_id
from headrace_common.rpc.channel import open_channel
from tests.linked_call import LinkedCall

# Decode workers admit routers without a ticket.
_CALLER = Credentials(role=Role.ROUTER)
_WORDS = "river stone market window garden letter winter travel engine silver "
PROMPT = _WORDS * 20
"""200 tokens of most models."""
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
# The last events of an answer, with its usage.
_TAIL_BYTES = 1_024


@dataclass(slots=True)
class Sample:
    """Seconds to the first token of each request, and the messages or chunks that carried its tokens."""

    first_s: list[float] = field(default_factory=list)
    messages: int = 0

    def add(self, begin_s: float, first_s: float, messages: int, tokens: int) -> None:
        """Records one answer. Raises ValueError when tokens are missing."""
        if tokens != TOKENS:
            raise ValueError(f"{tokens} tokens came, not {TOKENS}")
        self.first_s.append(first_s - begin_s)
        self.messages += messages


Ask = Callable[[Sample], Awaitable[None]]


async def run_streams(asks: list[Ask], requests: int) -> Sample:
    """Divides `requests` among the streams. Each stream has one request under way."""
    sample = Sample()
    left = iter(range(requests))

    async def stream(ask: Ask) -> None:
        for _ in left:
            await ask(sample)

    async with asyncio.timeout(100):
        await asyncio.gather(*map(stream, asks))
    return sample


def _sampling(gap_ms: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(max_tokens=TOKENS + gap_ms, temperature=0.0, ignore_eos=True)


async def _read(call: Any, sample: Sample, begin_s: float, direct: bool) -> None:
    first_s, messages, tokens = 0.0, 0, 0
    async for response in call:
        count = len(response.tokens.token_ids if direct else response.token_ids)
        if count:
            first_s = first_s or time.perf_counter()
            tokens += count
            messages += 1
    sample.add(begin_s, first_s, messages, tokens)


@asynccontextmanager
async def grpc_router(endpoint: str, streams: int, gap_ms: int) -> AsyncIterator[list[Ask]]:
    """Through our router, all streams over one connection."""
    request = inference_pb2.GenerateRequest(
        model=MODEL,
        text=PROMPT,
        sampling=_sampling(gap_ms),
        prefill_placement=inference_pb2.PREFILL_PLACEMENT_LOCAL,
    )
    async with open_channel(endpoint, _CALLER) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def ask(sample: Sample) -> None:
            begin_s = time.perf_counter()
            await _read(stub.Generate(request, timeout=60), sample, begin_s, False)

        yield [ask] * streams


@asynccontextmanager
async def grpc_chats(
    endpoint: str, streams: int, next_chat: Callable[[], tuple[str, str]]
) -> AsyncIterator[list[Ask]]:
    """Chats with remote prefill through our router, with the system's and the user's message of `next_chat`."""
    async with open_channel(endpoint, _CALLER) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def ask(sample: Sample) -> None:
            system, user = next_chat()
            request = inference_pb2.GenerateRequest(model=MODEL, sampling=_sampling(0))
            request.chat.messages.add(role="system", content=system)
            request.chat.messages.add(role="user", content=user)
            begin_s = time.perf_counter()
            await _read(stub.Generate(request, timeout=60), sample, begin_s, False)

        yield [ask] * streams


@asynccontextmanager
async def grpc_worker(
    endpoint: str, incarnation: str, streams: int, gap_ms: int
) -> AsyncIterator[list[Ask]]:
    """At the decode worker itself, with tokens instead of text, on a link for each request."""
    async with open_channel(endpoint, _CALLER) as channel:

        async def ask(sample: Sample) -> None:
            request = decode_pb2.GenerateRequest(
                transfer_id=new_transfer_id(),
                incarnation=incarnation,
                token_ids=PROMPT.encode(),
                sampling=_sampling(gap_ms),
            )
            begin_s = time.perf_counter()
            await _read(LinkedCall(channel, request, 60), sample, begin_s, True)

        yield [ask] * streams


class _HttpStream(asyncio.Protocol):
    """One kept connection, one request at a time.

    `reads_usage`: tokens are those of the last event, because an event may have several.
    """

    def __init__(self, *, reads_usage: bool) -> None:
        self._reads_usage = reads_usage
        self._transport: Any = None
        self._tail = b""
        self._ended: asyncio.Future[None] | None = None
        self.first_s = 0.0
        self.messages = 0
        self.tokens = 0

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        self._transport = transport

    async def ask(self, request: bytes, sample: Sample) -> None:
        """Sends the request and reads its answer."""
        self._ended = asyncio.get_running_loop().create_future()
        self.first_s, self.messages, self.tokens, self._tail = 0.0, 0, 0, b""
        begin_s = time.perf_counter()
        self._transport.write(request)
        await self._ended
        if self._reads_usage:
            found = _USAGE.search(self._tail)
            self.tokens = int(found[1]) if found is not None else 0
        sample.add(begin_s, self.first_s, self.messages, self.tokens)

    def data_received(self, data: bytes) -> None:
        """Counts events. The last chunk ends the answer."""
        # An event split over two reads is counted at its beginning.
        seen = self._tail[-7:] + data
        count = seen.count(b"data: {") - self._tail[-7:].count(b"data: {")
        if count:
            self.first_s = self.first_s or time.perf_counter()
            self.messages += 1
            self.tokens += count
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        whole = self._tail.endswith(b"0\r\n\r\n")
        if whole and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fails the answer under way."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(exc or ConnectionError("the connection was closed"))


@asynccontextmanager
async def http(
    port: int, streams: int, gap_ms: int, *, reads_usage: bool = False
) -> AsyncIterator[list[Ask]]:
    """An OpenAI-style completion, with a connection for each stream."""
    content: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": TOKENS + gap_ms,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    if reads_usage:
        content["stream_options"] = {"include_usage": True}
    request = post("/v1/completions", content)
    async with connected(port, streams, lambda: request, reads_usage=reads_usage) as asks:
        yield asks


def post(path: str, content: dict[str, Any]) -> bytes:
    """A request over HTTP, with a body in JSON."""
    body = json.dumps(content).encode()
    return (
        b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (path.encode(), len(body), body)
    )


@asynccontextmanager
async def connected(
    port: int, streams: int, next_request: Callable[[], bytes], *, reads_usage: bool = True
) -> AsyncIterator[list[Ask]]:
    """Sends what `next_request` returns, with a connection for each stream."""
    loop = asyncio.get_running_loop()
    connections = [
        await loop.create_connection(
            lambda: _HttpStream(reads_usage=reads_usage), "127.0.0.1", port
        )
        for _ in range(streams)
    ]

    def asker(protocol: _HttpStream) -> Ask:
        return lambda sample: protocol.ask(next_request(), sample)

    try:
        yield [asker(protocol) for _, protocol in connections]
    finally:
        for transport, _ in connections:
            transport.close()


def request_count(streams: int, gap_ms: int) -> int:
    """Enough requests to make CPU ticks of 10 ms small, and few enough for a short run."""
    if gap_ms:
        return 8 if streams == 1 else 3 * streams
    return 60 if streams == 1 else 320
