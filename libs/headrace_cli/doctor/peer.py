"""Tests TCP ports both ways between two hosts: one runs `headrace doctor answer`, the other `headrace doctor peer`.

The host that asks connects to each port of the host that answers. That one connects back to the same ports of the
address from which it was called, and to no other. So the host that asks learns which ports a firewall closes, and how
far the clocks differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from headrace_cli.doctor.checks import Finding, Verdict, clock_findings
from headrace_common.errors import ConfigError
from headrace_common.version import version

PORTS_MAX: Final = 16
DEFAULT_PORTS: Final = "7052,7053,15000,16000,17000"
"""Ports of workers, and of the KV transports' range both ends and the middle."""
ANSWER_S_MAX: Final = 3_600.0
_CONNECT_S: Final = 2.0
_REPLY_S: Final = 3.0 * _CONNECT_S
_LINE_MAX: Final = 512
_CALLS_MAX: Final = 64
"""Most calls that are answered at once."""
_GREETING: Final = "headrace-doctor"


@dataclass(frozen=True, slots=True)
class Reply:
    """What the other host says: the ports at which it reached this one, its version and the time of its clock."""

    reached: frozenset[int]
    version: str
    unix_ns: int


def parse_ports(text: str) -> tuple[int, ...]:
    """Reads "7052,15000". Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not (part.isascii() and part.isdecimal() and len(part) < 6)]
    ports = [] if wrong else [int(part) for part in parts]
    if wrong or len(ports) > PORTS_MAX or not all(0 < port < 65_536 for port in ports):
        raise ConfigError(
            f"--ports: give up to {PORTS_MAX} ports from 1 to 65535, such as 7052,15000"
        )
    return tuple(dict.fromkeys(ports))


async def answer_calls(host: str, ports: Sequence[int], seconds: float) -> list[Finding]:
    """Answers on this host's address `host` for some seconds. Reports the ports that other processes have."""
    busy = asyncio.Semaphore(_CALLS_MAX)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if busy.locked():
            writer.close()
            return
        async with busy:
            with contextlib.suppress(OSError, ValueError, TimeoutError):
                async with asyncio.timeout(_REPLY_S + _CONNECT_S):
                    await _answer(reader, writer, host)
        writer.close()

    async with _listening(host, ports, answer) as taken:
        if len(taken) == len(ports):
            raise ConfigError(
                f"other processes have all of the ports {_named(ports)} on {host}: give others"
            )
        await asyncio.sleep(seconds)
    return _taken_findings(taken)


async def ask_peer(peer: str, host: str, ports: Sequence[int]) -> list[Finding]:
    """Tests the ports to `peer` and back to `host`, this host's address. Empty for the one that the kernel chooses."""

    async def ignore(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with _listening(host or "0.0.0.0", ports, ignore) as taken:
        start_ns = time.time_ns()
        replies = await asyncio.gather(*(_ask(peer, host, port, ports) for port in ports))
        end_ns = time.time_ns()
    # The replies of our own program before those of another one that has a port.
    answers = [reply for reply in replies if isinstance(reply, Reply)]
    answers.sort(key=lambda reply: not reply.version)
    if not answers:
        causes = "; ".join(sorted({str(reply) for reply in replies}))
        remedy = f"run `headrace doctor answer {peer}` there, and open a port of {_named(ports)}"
        return [Finding(Verdict.ERROR, f"to {peer}", f"no port answers ({causes})", remedy)]
    out = {port for port, reply in zip(ports, replies, strict=True) if isinstance(reply, Reply)}
    back = frozenset[int]().union(*(reply.reached for reply in answers))
    # A taken port still shows whether a connection reaches it.
    return [
        _direction(f"to {peer}", ports, out),
        _direction(f"from {peer}", ports, back),
        *_taken_findings(taken),
        *_version_findings(peer, answers[0]),
        *clock_findings(peer, answers[0].unix_ns, start_ns, end_ns),
    ]


async def _ask(peer: str, host: str, port: int, ports: Sequence[int]) -> Reply | str:
    """The reply on one port, or why there is none."""
    local = (host, 0) if host else None
    try:
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(
                peer, port, local_addr=local, limit=_LINE_MAX
            )
    except TimeoutError:
        return f"nothing within {_CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or type(error).__name__
    try:
        async with asyncio.timeout(_REPLY_S):
            writer.write(f"{_GREETING} {','.join(map(str, ports))}\n".encode())
            return _parsed(json.loads(await reader.readline()))
    except (OSError, ValueError, KeyError, TypeError):
        # Another program has this port, but the connection shows that it is open.
        return Reply(frozenset(), "", 0)
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
    """Answers one call. Raises ValueError for a call that is none."""
    word, _, listed = (await reader.readline()).decode("ascii").strip().partition(" ")
    if word != _GREETING:
        raise ValueError(word)
    ports = parse_ports(listed)
    caller = writer.get_extra_info("peername")[0]
    found = await asyncio.gather(*(_reaches(caller, port, host) for port in ports))
    reply = {
        "reached": [port for port, reached in zip(ports, found, strict=True) if reached],
        "version": version(),
        "unix_ns": time.time_ns(),
    }
    writer.write(json.dumps(reply).encode() + b"\n")
    await writer.drain()


async def _reaches(caller: str, port: int, host: str) -> bool:
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(caller, port, local_addr=(host, 0))
    except OSError:
        return False
    writer.close()
    return True


def _parsed(values: dict[str, Any]) -> Reply:
    reached = frozenset(int(port) for port in values["reached"][:PORTS_MAX])
    return Reply(reached, str(values["version"])[:_LINE_MAX], int(values["unix_ns"]))


@asynccontextmanager
async def _listening(host: str, ports: Sequence[int], handler: Any) -> AsyncIterator[list[int]]:
    """Listens on the ports, and yields those that another process has."""
    taken: list[int] = []
    servers: list[asyncio.Server] = []
    try:
        for port in ports:
            try:
                servers.append(await asyncio.start_server(handler, host, port, limit=_LINE_MAX))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(
                        f"cannot listen on {host}:{port}: {error.strerror}; name an address of this host"
                    ) from error
                taken.append(port)
        yield taken
    finally:
        for server in servers:
            server.close()


def _direction(subject: str, ports: Sequence[int], reached: frozenset[int] | set[int]) -> Finding:
    closed = [port for port in ports if port not in reached]
    if not closed:
        return Finding(Verdict.OK, subject, f"ports {_named(ports)} are open")
    return Finding(
        Verdict.ERROR,
        subject,
        f"ports {_named(closed)} are closed",
        "open them in the firewall between the hosts: docs/security.md lists the ports of each service",
    )


def _taken_findings(ports: Sequence[int]) -> list[Finding]:
    if not ports:
        return []
    detail = f"other processes have {_named(ports)}, and answered there"
    return [Finding(Verdict.OK, "ports in use", detail)]


def _version_findings(peer: str, reply: Reply) -> list[Finding]:
    if not reply.version or reply.version == version():
        return []
    detail = f"{peer} has version {reply.version}, and this host {version()}"
    return [Finding(Verdict.WARNING, "versions", detail, "install one version on both")]


def _named(ports: Sequence[int]) -> str:
    return ", ".join(map(str, ports))
