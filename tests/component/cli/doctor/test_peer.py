"""Ports both ways between two hosts, which are two loopback addresses here."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from headrace_cli.doctor import peer
from headrace_cli.doctor.checks import Finding, Verdict
from headrace_cli.doctor.peer import answer_calls, ask_peer
from headrace_common.errors import ConfigError
from headrace_common.version import version
from tests.ports import free_port
from tests.waiting import until

_HERE, _THERE = "127.0.3.1", "127.0.3.2"


@asynccontextmanager
async def answering(ports: Sequence[int]) -> AsyncIterator[None]:
    task = asyncio.create_task(answer_calls(_THERE, ports, 600.0))
    try:
        await until(lambda: task.done() or all(map(_listens, ports)))
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((_THERE, port)) == 0


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    return {one.subject: one for one in findings}


async def test_open_ports_both_ways_are_in_order() -> None:
    ports = [free_port() for _ in range(2)]
    async with answering(ports):
        found = await ask_peer(_THERE, _HERE, ports)
    assert {one.subject for one in found} == {f"to {_THERE}", f"from {_THERE}"}
    assert {one.verdict for one in found} == {Verdict.OK}


async def test_a_port_that_is_closed_in_one_direction_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = (free_port() for _ in range(2))
    async with answering([first]):
        found = by_subject(await ask_peer(_THERE, _HERE, [first, second]))
        to, back = found[f"to {_THERE}"], found[f"from {_THERE}"]
        assert (to.verdict, f"ports {second} are closed" in to.detail) == (Verdict.ERROR, True)
        assert back.verdict is Verdict.OK

        async def reaches(_: str, port: int, host: str) -> bool:
            return port == first

        monkeypatch.setattr(peer, "_reaches", reaches)
        found = by_subject(await ask_peer(_THERE, _HERE, [first, second]))
        assert f"ports {second} are closed" in found[f"from {_THERE}"].detail


async def test_a_host_that_does_not_answer_is_an_error() -> None:
    (finding,) = await ask_peer(_THERE, _HERE, [free_port()])
    assert finding.verdict is Verdict.ERROR
    assert "headrace doctor answer" in finding.remedy


async def test_another_version_and_another_clock_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = [free_port()]
    async with answering(ports):
        assert "versions" not in by_subject(await ask_peer(_THERE, _HERE, ports))
        read = peer._parsed

        def shifted(values: dict[str, object]) -> peer.Reply:
            reply = read({**values, "unix_ns": int(str(values["unix_ns"])) + 3_600 * 10**9})
            return peer.Reply(reply.reached, "0.0.1", reply.unix_ns)

        monkeypatch.setattr(peer, "_parsed", shifted)
        found = by_subject(await ask_peer(_THERE, _HERE, ports))
    assert f"0.0.1, and this host {version()}" in found["versions"].detail
    assert "ahead of" in found[_THERE].detail


async def test_a_port_of_another_program_is_tested_and_named() -> None:
    port, other = (free_port() for _ in range(2))
    with socket.create_server((_HERE, other)):
        async with answering([port, other]):
            found = by_subject(await ask_peer(_THERE, _HERE, [port, other]))
    assert found[f"from {_THERE}"].verdict is Verdict.OK
    assert str(other) in found["ports in use"].detail


async def test_a_caller_that_does_not_greet_gets_no_answer_and_no_call_back() -> None:
    port, target = (free_port() for _ in range(2))
    with socket.create_server((_HERE, target)) as server:
        server.setblocking(False)
        async with answering([port]):
            for line in (f"hello {target}", "headrace-doctor x", "headrace-doctor " + "1," * 300):
                reader, writer = await asyncio.open_connection(_THERE, port, local_addr=(_HERE, 0))
                writer.write(f"{line}\n".encode())
                async with asyncio.timeout(20):
                    assert await reader.read() == b""
                writer.close()
            with pytest.raises(BlockingIOError):
                server.accept()
            # The same call in the right form is answered, so the above could have been.
            reader, writer = await asyncio.open_connection(_THERE, port, local_addr=(_HERE, 0))
            writer.write(f"headrace-doctor {target}\n".encode())
            async with asyncio.timeout(20):
                assert json.loads(await reader.readline())["reached"] == [target]
            writer.close()


async def test_only_ports_of_others_or_a_foreign_address_cannot_be_answered_on() -> None:
    port = free_port()
    with socket.create_server((_THERE, port)), pytest.raises(ConfigError, match=str(port)):
        await answer_calls(_THERE, [port], 1.0)
    with pytest.raises(ConfigError, match="an address of this host"):
        await answer_calls("192.0.2.1", [port], 1.0)
