"""Peers that misuse HTTP/2 on every gRPC listener of every service, beside another client."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace_common.rpc.channel import open_blocking_channel
from headrace_common.rpc.listener import CALL_ENTRIES_MAX, HANDSHAKE_S, PING_STRIKES_MAX
from tests.ports import free_port
from tests.security.bystander import ROOT
from tests.security.grpc_flood import ATTACKS
from tests.security.raw_http2 import PING, RawPeer, frame
from tests.suite.deployment import Suite, suite

SERVICES = ("registry", "router", "prefill", "decode", "planner")
# A machine that is ten times slower meets this.
DELAY_MAX_S = 5.0
GROWTH_BYTES_MAX = 192 * 1024 * 1024
SLACK_S = 5.0


@contextmanager
def asking(endpoint: str) -> Iterator[list[float]]:
    """Another client. Yields how long its calls take."""
    found: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        with open_blocking_channel(endpoint) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not stop.is_set():
                start_s = time.monotonic()
                try:
                    stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
                found.append(time.monotonic() - start_s)
                time.sleep(0.01)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def listeners(it: Suite, picker: int, probes: Mapping[str, int]) -> Iterator[tuple[str, str, int]]:
    """The name, address and process of every gRPC listener."""
    for child in it.deployment.children:
        name, process = child.spec.service, child.process.pid
        yield f"{name} internal_listen", child.endpoint, process
        yield f"{name} health_listen", f"127.0.0.1:{probes[name]}", process
        if child.client_endpoint:
            yield f"{name} listen", child.client_endpoint, process
            yield f"{name} endpoint_picker_listen", f"127.0.0.1:{picker}", process


def check_connection(endpoint: str) -> None:
    """Pings beyond the bound cost a peer its connection, as does a peer that takes no part in the protocol."""
    with (
        RawPeer(endpoint, acknowledges=True) as peer,
        RawPeer(endpoint, acknowledges=False) as mute,
    ):
        start_s = time.monotonic()
        for _ in range(PING_STRIKES_MAX + 3):
            peer.send(frame(PING, content=b"12345678"))
        assert peer.closed_within(SLACK_S), endpoint
        assert mute.closed_within(HANDSHAKE_S + SLACK_S - (time.monotonic() - start_s)), endpoint


@contextmanager
def attacker() -> Iterator[Callable[[str, str], None]]:
    """A process that attacks an endpoint for ATTACK_S in a way of `ATTACKS`."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.security.grpc_flood"],
        cwd=ROOT,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        commands, replies = process.stdin, process.stdout

        def attack(endpoint: str, kind: str) -> None:
            commands.write(f"{endpoint} {kind}\n")
            commands.flush()
            assert replies.readline() == "done\n"

        yield attack
        commands.close()


def check_attack(
    name: str, endpoint: str, process: psutil.Process, kind: str, attack: Callable[[str, str], None]
) -> str:
    """Attacks a listener, and checks what it costs others."""
    before_bytes = process.memory_info().rss
    with asking(endpoint) as times:
        attack(endpoint, kind)
    grown_bytes = process.memory_info().rss - before_bytes
    worst_s = max(times)
    line = f"{name}, {kind}: longest {1e3 * worst_s:.0f} ms, +{grown_bytes / 2**20:.0f} MiB"
    assert worst_s < DELAY_MAX_S, line
    assert grown_bytes < GROWTH_BYTES_MAX, line
    return line


@pytest.mark.timeout(300)
async def test_a_peer_that_misuses_http2_costs_others_little_on_any_listener(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probes = {service: free_port() for service in SERVICES}
    picker = free_port()
    settings = [(service, "health_listen", f"127.0.0.1:{port}") for service, port in probes.items()]
    settings.append(("router", "endpoint_picker_listen", f"127.0.0.1:{picker}"))
    async with suite(tmp_path, planner=True, settings=tuple(settings)) as it:
        found = list(listeners(it, picker, probes))
        assert len(found) == 2 * len(SERVICES) + 2
        metadata = tuple((f"x-{number}", "1") for number in range(CALL_ENTRIES_MAX + 1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(it.channel).Check(
                health_pb2.HealthCheckRequest(), metadata=metadata, timeout=10
            )
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await asyncio.gather(
            *(asyncio.to_thread(check_connection, endpoint) for _, endpoint, _ in found)
        )
        with attacker() as attack:
            for name, endpoint, process_id in found:
                process = psutil.Process(process_id)
                for kind in ATTACKS:
                    line = await asyncio.to_thread(
                        check_attack, name, endpoint, process, kind, attack
                    )
                    with capsys.disabled():
                        print(f"\n{line}", end="")
