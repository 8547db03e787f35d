"""Compares ways to carry tokens from a decode worker to a router: CPU of both sides per token.

    python -m bench.decode_link [--gaps 0,5] [--streams 1,32,64,256] [--rounds 5] [--output bench/results]

The first way is the decode link, with a message for each step of the engine. The second is the link's messages over
TCP, each behind its length: its difference from the first is the price of grpc.aio. The reading side is this process,
which only collects the tokens. The worker is the step engine of bench/proxy/workers.py, which costs little. Ratios are
medians over the rounds, in which all ways take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import grpc
import grpc.aio
import uvloop
from opentelemetry.context import Context

from bench.proxy.load import request_count
from bench.proxy.workers import TOKENS, StepWorker, link
from bench.support.processes import cpu_seconds, process, until_listening
from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import sampling_pb2
from headrace_common.deadlines import Deadline
from headrace_common.process.free_port import free_port
from headrace_common.rpc.channel import open_channel
from headrace_router.decode_link.answer import LinkedAnswer
from headrace_router.decode_link.answers import LinkedAnswers
from headrace_router.decode_link.link import WINDOW_TOKENS
from headrace_router.decode_link.links import DecodeLinks, LinkedCall
from headrace_router.decode_link.outgoing import OutgoingRequests

_LENGTH_BYTES: Final = 4
_NOTES: Final = """# From a decode worker to a router

{rounds} rounds, {cpus} CPUs for everything, shared with other work: compare the ratios. Made by
`python -m bench.decode_link`. The script's first lines describe the ways and the columns.

{table}

Link's messages over TCP have no TLS, no credentials and no limits. CPU of the worker comes in ticks of 10 ms, so small
figures are coarse. At a gap of 0, the worker's steps join while a message is written.
"""
_LINK: Final = "Link"
_FRAMED: Final = "Link's messages over TCP"

Ask = Callable[[decode_pb2.GenerateRequest], Awaitable[int]]
"""Sends a request. Returns the number of tokens of its answer."""


class Frames(asyncio.Protocol):
    """Messages behind their lengths, over one connection."""

    def __init__(self, receive: Callable[[bytes], None]) -> None:
        self._receive = receive
        self._transport: Any = None
        self._buffer = bytearray()

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Passes on every complete message."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH_BYTES:
            end = start + _LENGTH_BYTES + int.from_bytes(self._buffer[start : start + 4], "little")
            if len(self._buffer) < end:
                break
            self._receive(bytes(self._buffer[start + _LENGTH_BYTES : end]))
            start = end
        del self._buffer[:start]

    def send(self, data: bytes) -> None:
        """Sends one message."""
        self._transport.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    def close(self) -> None:
        """Ends the connection."""
        self._transport.close()


class FramedWorker(Frames):
    """The worker's end of a connection."""

    def __init__(self) -> None:
        worker = StepWorker()
        super().__init__(lambda data: worker.receive(decode_pb2.LinkRequest.FromString(data)))
        self._worker = worker

    def connection_made(self, transport: Any) -> None:
        """Starts to send steps."""
        super().connection_made(transport)
        self._task = asyncio.create_task(self._send_steps())

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the steps."""
        self._task.cancel()

    async def _send_steps(self) -> None:
        while True:
            self.send((await self._worker.next_message()).SerializeToString())


async def serve(grpc_port: int, tcp_port: int) -> None:
    """The worker's process."""
    handlers: dict[str, Any] = {
        "Link": grpc.stream_stream_rpc_method_handler(
            link,
            request_deserializer=decode_pb2.LinkRequest.FromString,
            response_serializer=decode_pb2.LinkResponse.SerializeToString,
        ),
    }
    server = grpc.aio.server()
    name = "headrace.decode.v1.DecodeService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    server.add_insecure_port(f"127.0.0.1:{grpc_port}")
    await server.start()
    await asyncio.get_running_loop().create_server(FramedWorker, "127.0.0.1", tcp_port)
    await asyncio.Event().wait()


@asynccontextmanager
async def by_link(port: int) -> AsyncIterator[Ask]:
    """The router's decode link."""
    async with open_channel(f"127.0.0.1:{port}") as channel:
        links = DecodeLinks(lambda: channel)

        async def ask(request: decode_pb2.GenerateRequest) -> int:
            return await _count(links.open(request, Deadline.after(60.0), Context()))

        yield ask
        await links.close()


@asynccontextmanager
async def by_frames(port: int) -> AsyncIterator[Ask]:
    """The same messages over TCP."""
    answers, outgoing = LinkedAnswers(), OutgoingRequests(1024 * 1024)
    numbers = iter(range(1, sys.maxsize))
    _, frames = await asyncio.get_running_loop().create_connection(
        lambda: Frames(lambda data: _ignored(answers.receive(_parsed(data)))), "127.0.0.1", port
    )

    def flush() -> None:
        while (message := outgoing.next_message()) is not None:
            frames.send(message.SerializeToString())

    async def ask(request: decode_pb2.GenerateRequest) -> int:
        opened = decode_pb2.LinkOpen(
            stream_id=next(numbers), request=request, credit_tokens=WINDOW_TOKENS
        )
        answer = LinkedAnswer(opened.stream_id, WINDOW_TOKENS, outgoing.grant)
        answers.add(answer)
        outgoing.open(opened)
        asyncio.get_running_loop().call_soon(flush)
        return await _count(answer)

    yield ask
    frames.close()


def _parsed(data: bytes) -> decode_pb2.LinkResponse:
    return decode_pb2.LinkResponse.FromString(data)


def _ignored(value: object) -> None:
    pass


async def _count(answer: LinkedCall | LinkedAnswer) -> int:
    """As the router's attempts do: tokens go past the reader, which waits for the end."""
    tokens = 0

    def add(token_ids: Sequence[int], logprobs: Sequence[Any]) -> bool:
        nonlocal tokens
        tokens += len(token_ids)
        return True

    answer.forward(add)
    while True:
        event = await answer.read()
        if isinstance(event, decode_pb2.Finished):
            return tokens
        if isinstance(event, decode_pb2.Tokens):
            tokens += len(event.token_ids)


async def run_streams(ask: Ask, streams: int, requests: int, gap_ms: int) -> None:
    """Divides the requests among the streams. Raises ValueError when tokens are missing."""
    request = decode_pb2.GenerateRequest(
        token_ids=range(200),
        sampling=sampling_pb2.SamplingParams(max_tokens=TOKENS + gap_ms),
    )
    left = iter(range(requests))

    async def stream() -> None:
        for _ in left:
            tokens = await ask(request)
            if tokens != TOKENS:
                raise ValueError(f"{tokens} tokens came, not {TOKENS}")

    async with asyncio.timeout(100):
        await asyncio.gather(*(stream() for _ in range(streams)))


async def main(arguments: argparse.Namespace) -> None:
    """Measures and prints a table."""
    if arguments.serve:
        await serve(*map(int, arguments.serve.split(",")))
        return
    ports = free_port(), free_port()
    ways = {
        _LINK: lambda: by_link(ports[0]),
        _FRAMED: lambda: by_frames(ports[1]),
    }
    rows: dict[tuple[int, int, str], list[tuple[float, float]]] = {}
    command = (sys.executable, "-m", "bench.decode_link", f"--serve={ports[0]},{ports[1]}")
    with TemporaryDirectory() as folder:
        log = Path(folder) / "worker.log"
        async with process(*command, log=log) as worker:
            await until_listening(ports[1], worker, log)
            for turn in range(arguments.rounds):
                for gap_ms in map(int, arguments.gaps.split(",")):
                    for streams in map(int, arguments.streams.split(",")):
                        order = list(ways) if turn % 2 else list(ways)[::-1]
                        for name in order:
                            async with ways[name]() as ask:
                                await run_streams(ask, streams, streams, gap_ms)
                                worker_s, own_s = cpu_seconds(worker.pid), time.process_time()
                                count = request_count(streams, gap_ms)
                                await run_streams(ask, streams, count, gap_ms)
                                own_s = time.process_time() - own_s
                                worker_s = cpu_seconds(worker.pid) - worker_s
                            used = own_s / count / TOKENS * 1e6, worker_s / count / TOKENS * 1e6
                            rows.setdefault((gap_ms, streams, name), []).append(used)
    drawn = table(rows)
    print(drawn)
    if arguments.output:
        text = _NOTES.format(rounds=arguments.rounds, cpus=os.cpu_count(), table=drawn)
        (Path(arguments.output) / "decode_link.md").write_text(text)


def table(rows: dict[tuple[int, int, str], list[tuple[float, float]]]) -> str:
    """A line for each gap, number of streams and way."""
    titles = "| gap, ms | streams | way | reader, us/token | ratio to Link | worker, us/token |"
    lines = [titles, "|---" * 6 + "|"]
    for (gap_ms, streams, name), used in rows.items():
        base = rows[gap_ms, streams, _LINK]
        ratio = statistics.median(
            mine[0] / other[0] for mine, other in zip(used, base, strict=True)
        )
        reader, worker = (statistics.median(column) for column in zip(*used, strict=True))
        lines.append(
            f"| {gap_ms} | {streams} | {name} | {reader:.1f} | {ratio:.2f} | {worker:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--gaps", default="0,5")
    parser.add_argument("--streams", default="1,32,64,256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", default="")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    uvloop.run(main(parser.parse_args()))
