"""Which processes may write to this one where Yama's ptrace_scope is 1.

The kernel of the test machine may have no Yama. So the call that grants the permission is recorded here instead.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.transport.same_host import process_memory, tracers
from headrace_kv.transport.same_host.tracers import Permit, PermitServer, ancestors
from headrace_kv.transport.same_host.transport import SameHostTransport
from tests.waiting import until

# Writes a byte to the address, reports, and goes on once its input has ended.
WRITER = """
import os, sys
import numpy as np
from headrace_common.errors import TransferFailed
from headrace_kv.transport.same_host.transport import SameHostTransport
from tests.rdma.harness import (one_run)
session, address = sys.argv[1], int(sys.argv[2])
source = np.full(1, 7, np.uint8)
transport = SameHostTransport()
transport.register(source.ctypes.data, 1)
try:
    transport.write(session, one_run(source.ctypes.data, address, 1), 5.0)
    print("written", flush=True)
except TransferFailed as error:
    print(error, flush=True)
sys.stdin.read()
transport.close()
sys.stdin.close()
"""


@pytest.fixture
def permitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Scope 1, and the processes that were permitted one after the other."""
    scope = tmp_path / "ptrace_scope"
    scope.write_text("1\n")
    calls: list[int] = []
    monkeypatch.setattr(process_memory, "_YAMA", scope)
    monkeypatch.setattr(tracers, "set_tracer", calls.append)
    return calls


class Target:
    """This process, which lets senders write one byte."""

    def __init__(self) -> None:
        self.memory = np.zeros(1, np.uint8)
        self.transport = SameHostTransport(permit_tracers=True)
        self.transport.register(self.memory.ctypes.data, 1)

    @contextmanager
    def writer(self) -> Iterator[tuple[subprocess.Popen[str], str]]:
        """A process that writes, and its result."""
        words = (self.transport.session, str(self.memory.ctypes.data))
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        ) as process:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()


@pytest.fixture
def target(permitted: list[int]) -> Iterator[Target]:
    made = Target()
    yield made
    made.transport.close()


async def test_only_a_connected_sender_is_permitted(target: Target, permitted: list[int]) -> None:
    assert permitted == []
    with target.writer() as (writer, result):
        assert result == "written"
        assert permitted == [writer.pid]
    await until(lambda: permitted == [writer.pid, 0])


async def test_of_several_senders_the_nearest_common_ancestor_is_permitted(
    target: Target, permitted: list[int]
) -> None:
    with target.writer() as (first, _):
        with target.writer() as (second, result):
            assert result == "written"
            assert permitted == [first.pid, os.getpid()]
        await until(lambda: permitted[2:] == [first.pid])
    await until(lambda: permitted[3:] == [0])
    assert second.pid not in permitted


def test_a_process_without_the_token_is_not_permitted(permitted: list[int]) -> None:
    server = PermitServer(b"t" * 16)
    with pytest.raises(TransferFailed, match="does not permit"):
        Permit(server.name, b"u" * 16)
    Permit(server.name, b"t" * 16).close()
    server.close()
    assert permitted == [os.getpid(), 0]


def test_a_process_of_another_user_is_not_permitted(
    permitted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = PermitServer(b"t" * 16)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(TransferFailed, match="does not permit"):
        Permit(server.name, b"t" * 16)
    server.close()
    assert permitted == []


def test_a_permission_that_the_kernel_refuses_is_an_error_of_the_sender(
    permitted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> None:
        raise ConfigError("refused")

    monkeypatch.setattr(tracers, "set_tracer", refuse)
    server = PermitServer(b"t" * 16)
    with pytest.raises(TransferFailed, match="does not permit"):
        Permit(server.name, b"t" * 16)
    server.close()


def test_a_closed_transport_permits_none(target: Target, permitted: list[int]) -> None:
    with target.writer() as (writer, _):
        target.transport.close()
        assert permitted == [writer.pid, 0]


def test_without_a_common_ancestor_the_first_sender_stays_permitted(
    permitted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chains: Callable[[int], list[int]] = {1: [1], 2: [2]}.__getitem__
    monkeypatch.setattr(tracers, "ancestors", chains)
    permits = tracers.TracerPermits()
    permits.add(1)
    with pytest.raises(ConfigError, match="no common ancestor"):
        permits.add(2)
    assert permitted == [1]


def test_the_chain_of_a_process_begins_with_itself_and_its_parent() -> None:
    assert ancestors(os.getpid())[:2] == [os.getpid(), os.getppid()]
    assert ancestors(1 << 22) == []


@pytest.mark.parametrize(("scope", "by_name"), [("", True), ("0", True), ("1", False), ("2", True)])
def test_nothing_listens_unless_it_is_needed(
    scope: str, by_name: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "ptrace_scope"
    if scope:
        file.write_text(scope)
    monkeypatch.setattr(process_memory, "_YAMA", file)

    def fail(*words: object) -> socket.socket:
        raise AssertionError("a socket was made")

    monkeypatch.setattr(socket, "socket", fail)
    SameHostTransport(permit_tracers=by_name).close()
