"""The bounds of every HTTP listener of every service, and floods of strangers beside another client."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from headrace_common.http.bounds import (
    BODY_PAUSE_S,
    HEAD_BYTES_MAX,
    HEAD_WAIT_S,
    HEADERS_MAX,
    PIPELINED_MAX,
)
from tests.ports import free_port
from tests.security.bystander import KEY, ROOT, bystander
from tests.suite.deployment import Suite, suite

SERVICES = ("registry", "router", "prefill", "decode", "planner")
LISTENERS = (
    *((service, "metrics_listen") for service in SERVICES),
    ("router", "http_listen"),
    ("router", "status_listen"),
    ("decode", "http_listen"),
)
SLACK_S = 10.0
GROWTH_BYTES_MAX = 64 * 1024 * 1024
# A request of another client takes this long at most, or twice its time without an attack.
DELAY_MAX_S = 1.0
ATTACK_S = 4.0
IDLE_CONNECTIONS = 4_500
GET = b"GET / HTTP/1.1\r\nhost: x\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n"


@asynccontextmanager
async def deployed(folder: Path) -> AsyncIterator[tuple[Suite, dict[tuple[str, str], int]]]:
    """A deployment with all HTTP listeners, and the port of each."""
    keys = folder / "keys"
    keys.write_text(f"{KEY} bystander\n")
    ports = {listener: free_port() for listener in LISTENERS}
    settings = [(*listener, f"127.0.0.1:{port}") for listener, port in ports.items()]
    settings += [(service, "api_keys_file", str(keys)) for service in ("router", "decode")]
    async with suite(folder, planner=True, settings=tuple(settings)) as it:
        yield it, ports


async def exchange(port: int, sent: bytes, wait_s: float = 20.0) -> bytes:
    """What a listener answers until it closes the connection."""
    async with asyncio.timeout(wait_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        received = b""
        with contextlib.suppress(ConnectionError):
            writer.write(sent)
            await writer.drain()
            while data := await reader.read(65_536):
                received += data
        writer.transport.abort()
    return received


async def http_ports(it: Suite) -> set[int]:
    """The ports of all processes of the deployment that answer HTTP/1.1."""
    found: set[int] = set()

    async def ask(port: int) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            answer = await exchange(port, GET + b"connection: close\r\n\r\n", 5.0)
            if answer.startswith(b"HTTP/1.1 "):
                found.add(port)

    for child in it.deployment.children:
        connections = psutil.Process(child.process.pid).net_connections("tcp4")
        listening = {one.laddr[1] for one in connections if one.status == psutil.CONN_LISTEN}
        await asyncio.gather(*map(ask, listening))
    return found


async def check_bounds(port: int) -> None:
    """Tries each bound on one listener."""
    long = b"a" * HEAD_BYTES_MAX
    many = b"".join(b"x-%d: 1\r\n" % number for number in range(HEADERS_MAX + 1))
    for head in (
        b"GET /" + long + b" HTTP/1.1\r\n\r\n",
        GET + b"x: " + long,
        GET + long + b": x\r\n\r\n",
        GET + many + b"\r\n",
        GET + many,
    ):
        assert (await exchange(port, head)).startswith(b"HTTP/1.1 431 "), head[:40]
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n"
    for body in (b"0\r\n" + many * 2, b"0\r\nx: " + long * 3, b"1;" + long * 3):
        # The connection ends, whatever was answered before.
        await exchange(port, chunked + body)
    pipelined = await exchange(port, (GET + b"\r\n") * 20 * PIPELINED_MAX)
    assert pipelined.count(b"HTTP/1.1 ") <= 2 * PIPELINED_MAX


async def check_times(port: int) -> None:
    """Sends a part of a request, and expects that the listener ends it in time."""
    start_s = time.monotonic()
    answers = await asyncio.gather(
        exchange(port, GET[:-6], HEAD_WAIT_S + SLACK_S),
        exchange(port, GET + b"\r\n" + GET[:-6], HEAD_WAIT_S + SLACK_S),
        exchange(port, POST + b"content-length: 9\r\n\r\nab", BODY_PAUSE_S + SLACK_S),
        exchange(port, b"", HEAD_WAIT_S + SLACK_S),
    )
    assert answers[0].startswith(b"HTTP/1.1 408 ")
    # A listener with one request for each connection closes it earlier.
    assert b"HTTP/1.1 408 " in answers[1] or b"connection: close" in answers[1]
    assert answers[3] == b""
    assert time.monotonic() - start_s > HEAD_WAIT_S - 1


async def test_every_http_listener_of_every_service_has_every_bound(tmp_path: Path) -> None:
    async with deployed(tmp_path) as (it, ports):
        assert await http_ports(it) == set(ports.values())
        for port in ports.values():
            await check_bounds(port)
        # These wait for a real clock, all at once.
        await asyncio.gather(*map(check_times, ports.values()))


@asynccontextmanager
async def flooded(attack: str, port: int, count: int) -> AsyncIterator[None]:
    """Strangers attack while the block runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.security.http_flood"),
        *(attack, f"127.0.0.1:{port}", str(count)),
        cwd=ROOT,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            assert await process.stdout.readline()
        yield
        assert process.returncode is None
    finally:
        process.stdin.close()
        await process.wait()


async def request_times_s(ports: Sequence[int], path: str, period_s: float) -> list[float]:
    """How long requests on new connections take, shortest first."""
    found: list[float] = []
    end_s = time.monotonic() + period_s
    while time.monotonic() < end_s:
        for port in ports:
            start_s = time.monotonic()
            head = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            answer = await exchange(port, head.encode())
            assert answer.startswith(b"HTTP/1.1 200 "), answer[:100]
            found.append(time.monotonic() - start_s)
        await asyncio.sleep(0.01)
    return sorted(found)


def p99(times: Sequence[float]) -> float:
    """The time that one of a hundred exceeds."""
    return times[int(0.99 * (len(times) - 1))]


@pytest.mark.parametrize(
    ("attack", "connections"), [("heads", 3_000), ("endless", 500), ("bodies", 1_000)]
)
async def test_input_without_a_key_takes_bounded_memory(
    tmp_path: Path, attack: str, connections: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async with deployed(tmp_path) as (it, ports), bystander(it, KEY) as client:
        router = psutil.Process(it.child("router").process.pid)
        port = ports["router", "http_listen"]
        quiet = await request_times_s([port], "/health", 1.0)
        quiet_s, before_bytes = time.monotonic(), router.memory_info().rss
        async with flooded(attack, port, connections):
            start_s = time.monotonic()
            most_bytes, times = 0, list[float]()
            while time.monotonic() < start_s + ATTACK_S:
                times += await request_times_s([port], "/health", 0.1)
                most_bytes = max(most_bytes, router.memory_info().rss)
            end_s = time.monotonic()
        with capsys.disabled():
            client.report(f"\n{attack}: quiet", quiet_s - 1.0, quiet_s)
            client.report(f"{attack}: attacked", start_s, end_s)
            grown = (most_bytes - before_bytes) / 2**20
            print(f"router +{grown:.0f} MiB, /health p99 {1e3 * p99(sorted(times)):.0f} ms")
        assert most_bytes - before_bytes < GROWTH_BYTES_MAX
        assert p99(sorted(times)) < max(DELAY_MAX_S, 2 * p99(quiet))
        assert client.gaps_s(start_s, end_s)[-1] < max(
            DELAY_MAX_S, 2 * client.gaps_s(quiet_s - 1.0, quiet_s)[-1]
        )


async def test_health_and_metrics_answer_while_strangers_hold_connections(tmp_path: Path) -> None:
    async with deployed(tmp_path) as (it, ports):
        grpc_port = int(it.child("router").client_endpoint.rpartition(":")[2])
        for held in (ports["router", "http_listen"], grpc_port):
            async with flooded("idle", held, IDLE_CONNECTIONS):
                metrics = await request_times_s(
                    [ports["router", "metrics_listen"]], "/metrics", 2.0
                )
                health = await request_times_s([ports["router", "http_listen"]], "/health", 2.0)
            assert p99(metrics) < DELAY_MAX_S
            assert p99(health) < DELAY_MAX_S
