"""The proxy for two stock vLLM servers (examples/pair.py), with two small HTTP servers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from examples.pair import PairOptions, serving, split
from tests.waiting import until

PATH = "/v1/completions"
Behaviour = Callable[["Upstream", asyncio.StreamWriter], Awaitable[None]]


@dataclass(slots=True)
class Upstream:
    """A server that records requests and runs `behaviour` for each."""

    behaviour: Behaviour
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    disconnects: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = re.findall(rb"(?i)content-length: (\d+)", head)
            self.bodies.append(json.loads(await reader.readexactly(int(length))))
            working = asyncio.ensure_future(self.behaviour(self, writer))
            disconnect = asyncio.ensure_future(reader.read(1))
            await asyncio.wait({working, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            self.disconnects += not working.done()
            for task in (working, disconnect):
                task.cancel()
            await asyncio.gather(working, disconnect, return_exceptions=True)
        writer.close()


def response(body: bytes, status: str = "200 OK") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        + body
    )


async def responds(upstream: Upstream, writer: asyncio.StreamWriter) -> None:
    writer.write(response(b'{"number": %d}' % len(upstream.bodies)))
    await writer.drain()


async def fails(upstream: Upstream, writer: asyncio.StreamWriter) -> None:
    writer.write(response(b'{"error": "no"}', "500 Internal Server Error"))
    await writer.drain()


async def hangs(upstream: Upstream, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def breaks(upstream: Upstream, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def waits_for_kv(upstream: Upstream, writer: asyncio.StreamWriter) -> None:
    """Waits for a KV cache as decode does, but responds to a request without a transfer."""
    if "kv_transfer_params" in upstream.bodies[-1]:
        await asyncio.sleep(60)
    await responds(upstream, writer)


async def streams(upstream: Upstream, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    for number in range(3):
        writer.write(b"data: %d\n\n" % number)
        await writer.drain()
        await asyncio.sleep(0.02)


@dataclass(slots=True)
class Proxied:
    """A proxy and its two servers."""

    prefill: Upstream
    decode: Upstream
    port: int

    async def post(self, body: object, path: str = PATH) -> tuple[int, bytes]:
        url = f"http://127.0.0.1:{self.port}{path}"
        async with aiohttp.ClientSession() as client, client.post(url, json=body) as answer:
            return answer.status, await answer.read()

    async def send(self, data: bytes) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            async with asyncio.timeout(10):
                answer = await reader.read()
        finally:
            writer.close()
        head, _, content = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), content


@asynccontextmanager
async def proxied(
    prefill: Behaviour | None, decode: Behaviour | None, transfer_timeout_s: float = 5.0
) -> AsyncIterator[Proxied]:
    servers: list[asyncio.Server] = []
    upstreams: list[Upstream] = []
    for behaviour in (prefill, decode):
        upstream = Upstream(behaviour or hangs)
        server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
        upstream.port = server.sockets[0].getsockname()[1]
        if behaviour is None:
            server.close()
            await server.wait_closed()
        upstreams.append(upstream)
        servers.append(server)
    options = PairOptions(
        prefill=f"http://127.0.0.1:{upstreams[0].port}",
        decode=f"http://127.0.0.1:{upstreams[1].port}",
        pair_address="10.0.0.5:7730",
        host="127.0.0.1",
        port=0,
        timeout_s=2.0,
        transfer_timeout_s=transfer_timeout_s,
    )
    try:
        async with serving(options) as port:
            yield Proxied(upstreams[0], upstreams[1], port)
    finally:
        for server in servers:
            server.close()
            await server.wait_closed()


async def test_both_servers_get_the_request_with_one_transfer_id() -> None:
    async with proxied(responds, responds) as it:
        body = {"model": "m", "prompt": "hello", "max_tokens": 9, "stream": True, "n": 1}
        assert await it.post(body) == (200, b'{"number": 1}')
        (prefill,), (decode,) = it.prefill.bodies, it.decode.bodies
    sent, fetched = prefill.pop("kv_transfer_params"), decode.pop("kv_transfer_params")
    assert prefill == {"model": "m", "prompt": "hello", "max_tokens": 1}
    assert decode == body
    assert sent.pop("do_remote_decode") is fetched.pop("do_remote_prefill") is True
    assert (fetched.pop("remote_host"), fetched.pop("remote_port")) == ("10.0.0.5", 7730)
    assert sent == fetched
    assert set(sent) == {"transfer_id", "remaining_s"}


async def test_a_stream_is_forwarded() -> None:
    async with proxied(responds, streams) as it:
        status, content = await it.post({"messages": [{"role": "user", "content": "hi"}]})
    assert (status, content) == (200, b"data: 0\n\ndata: 1\n\ndata: 2\n\n")


@pytest.mark.parametrize("prefill", [None, fails, breaks])
async def test_decode_computes_the_prompt_when_prefill_fails(prefill: Behaviour | None) -> None:
    async with proxied(prefill, waits_for_kv) as it:
        status, _ = await it.post({"prompt": "hello"})
        assert status == 200
        assert "kv_transfer_params" not in it.decode.bodies[-1]
        await until(lambda: it.decode.disconnects == len(it.decode.bodies) - 1)


async def test_decode_computes_the_prompt_when_prefill_times_out() -> None:
    async with proxied(hangs, waits_for_kv, transfer_timeout_s=0.2) as it:
        assert (await it.post({"prompt": "hello"}))[0] == 200
        await until(lambda: it.prefill.disconnects == 1)


@pytest.mark.parametrize(
    ("decode", "status", "reason"),
    [(None, 502, "WORKER_GONE"), (breaks, 502, "WORKER_GONE"), (hangs, 504, "DEADLINE_EXCEEDED")],
)
async def test_errors_are_named(decode: Behaviour | None, status: int, reason: str) -> None:
    async with proxied(responds, decode) as it:
        got, content = await it.post({"prompt": "hello"})
    assert got == status
    assert json.loads(content)["error"]["type"] == reason
    assert json.loads(content)["error"]["message"]


async def test_a_disconnect_of_the_client_ends_both_requests() -> None:
    async with proxied(hangs, hangs) as it:
        request = asyncio.ensure_future(it.post({"prompt": "hello"}))
        await until(lambda: bool(it.prefill.bodies and it.decode.bodies))
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await until(lambda: bool(it.prefill.disconnects and it.decode.disconnects))


async def test_malformed_requests_are_rejected() -> None:
    async with proxied(responds, responds) as it:
        assert (await it.send(b"nonsense\r\n\r\n"))[0] == 400
        large = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n{}"
        assert (await it.send(large))[0] == 413
        for body in (b"[" * 100_000, b'{"a":' * 100_000):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            deep = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
            assert (await it.send(deep))[0] == 400
        assert it.decode.bodies == []


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3, 4]]},
        {"prompt": [1]},
        {"prompt": ""},
        {"prompt": "x", "n": 2},
        {"prompt": "x", "best_of": 3},
        {"messages": [], "use_beam_search": True},
        {},
    ],
)
def test_requests_that_are_not_split(body: dict[str, Any]) -> None:
    assert split(PATH, body, transfer_id="x", pair_address=("h", 1), remaining_s=1.0) is None


async def test_only_posted_objects_are_split_and_only_on_two_paths() -> None:
    async with proxied(responds, responds) as it:
        for path, method, body in (
            ("/v1/embeddings", "POST", {"prompt": "x"}),
            (PATH, "PUT", {"prompt": "x"}),
            (PATH, "POST", [1, 2]),
        ):
            content = json.dumps(body).encode()
            head = f"{method} {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {len(content)}"
            assert (await it.send(head.encode() + b"\r\n\r\n" + content))[0] == 200
            assert it.decode.bodies[-1] == body
        assert not it.prefill.bodies


async def test_transfer_parameters_of_clients_are_removed() -> None:
    async with proxied(responds, responds) as it:
        evil = {"prompt": "x", "kv_transfer_params": {"remote_host": "evil"}}
        await it.post(evil, "/v1/embeddings")
        assert it.decode.bodies == [{"prompt": "x"}]
