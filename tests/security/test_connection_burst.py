"""Many connections and chats of one host at once are no attack: they are answered, and others are not delayed."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.security.bystander import KEY, STRANGER_KEY, Bystander, attacked, bystander

CONNECTIONS = 2_000
CHATS = 200
# They are opened within a second, as far as the machine can.
ROUNDS, ROUND_S = 20, 0.05
QUIET_S = 2.0
HEALTH_EVERY_S = 0.1
ANSWER_S = 60.0
# On two busy cores. The bystander has twice its time, or a second more.
HEALTH_MAX_S = 10.0
P99_FACTOR, P99_MORE_S = 2.0, 1.0
OK, BUSY = b"HTTP/1.1 200 ", b"HTTP/1.1 503 "
HEALTH = "GET /health HTTP/1.1"
CHAT = (
    "POST /v1/chat/completions HTTP/1.1\r\n"
    f"authorization: Bearer {STRANGER_KEY}\r\ncontent-type: application/json"
)
CHAT_BODY = '{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}'


async def ask(host: str, port: int, head: str, body: str = "") -> bytes:
    """The response on a connection of its own."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        lines = (head, "host: x", "connection: close", f"content-length: {len(body)}", "", body)
        writer.write("\r\n".join(lines).encode())
        async with asyncio.timeout(ANSWER_S):
            return await reader.read()
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def watched_health(host: str, port: int) -> AsyncIterator[list[float]]:
    """Asks for /health all the time. Each answer must be 200. The list has their seconds."""
    took_s: list[float] = []

    async def watch() -> None:
        while True:
            start_s = time.monotonic()
            async with asyncio.timeout(HEALTH_MAX_S):
                assert (await ask(host, port, HEALTH)).startswith(OK)
            took_s.append(time.monotonic() - start_s)
            await asyncio.sleep(HEALTH_EVERY_S)

    watching = asyncio.create_task(watch())
    try:
        yield took_s
    finally:
        watching.cancel()
        done = await asyncio.gather(watching, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError), done


async def connect(host: str, port: int, stack: contextlib.AsyncExitStack, number: int) -> None:
    """Opens a connection that stays open. Every second one sends a request, which is answered."""
    reader, writer = await asyncio.open_connection(host, port)
    stack.callback(writer.close)
    if number % 2:
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        line = await reader.readline()
        assert line.startswith((OK, BUSY)), line


def p99_s(client: Bystander, start_s: float, end_s: float) -> float:
    gaps_s = client.gaps_s(start_s, end_s)
    return gaps_s[int(0.99 * (len(gaps_s) - 1))]


async def test_a_burst_of_one_host_is_answered_and_delays_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * CONNECTIONS:
        pytest.skip(f"needs {2 * CONNECTIONS} open files: ulimit -n {2 * CONNECTIONS}")
    host, port = "127.0.0.1", free_port()
    listen = ("router", "http_listen", f"{host}:{port}")
    async with attacked(tmp_path, listen) as it, bystander(it, KEY) as other:
        quiet_s = time.monotonic()
        await asyncio.sleep(QUIET_S)
        start_s = time.monotonic()
        async with contextlib.AsyncExitStack() as stack, watched_health(host, port) as took:
            opened = []
            for first in range(0, CONNECTIONS, CONNECTIONS // ROUNDS):
                opened += [
                    asyncio.create_task(connect(host, port, stack, number))
                    for number in range(first, first + CONNECTIONS // ROUNDS)
                ]
                await asyncio.sleep(ROUND_S)
            async with asyncio.timeout(ANSWER_S):
                await asyncio.gather(*opened)
            opened_s = time.monotonic()
            chats = await asyncio.gather(*(ask(host, port, CHAT, CHAT_BODY) for _ in range(CHATS)))
            for chat in chats:
                assert chat.startswith(OK), chat
                assert b'"completion_tokens": 4' in chat
            end_s = time.monotonic()
            # The host is not blocked afterwards either.
            assert (await ask(host, port, HEALTH)).startswith(OK)
        calm_s, loaded_s = p99_s(other, quiet_s, start_s), p99_s(other, start_s, end_s)
        with capsys.disabled():
            other.report("\nquiet", quiet_s, start_s)
            other.report(f"{CONNECTIONS} connections in {opened_s - start_s:.1f} s", start_s, end_s)
            print(f"/health: {len(took)} answers, the slowest in {max(took):.2f} s")
        assert loaded_s < max(P99_FACTOR * calm_s, calm_s + P99_MORE_S)
