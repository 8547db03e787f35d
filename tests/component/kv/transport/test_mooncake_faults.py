"""Mooncake with peers that are killed or frozen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from headrace_common.errors import TransferFailed
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.transport.factory import open_transport

PEER = """
import sys
import numpy as np
from headrace_kv.transport.factory import open_transport
memory = np.zeros(1 << 20, dtype=np.uint8)
transport = open_transport("mooncake", "127.0.0.1", "tcp")
transport.register(memory.ctypes.data, memory.nbytes)
print(transport.session, memory.ctypes.data, flush=True)
for line in sys.stdin:
    print(int(memory.sum()), flush=True)
"""


def start_peer() -> tuple[subprocess.Popen[str], str, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", PEER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    session, address = process.stdout.readline().split()
    return process, session, int(address)


def end_peer(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(timeout=5)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def test_another_peer_is_reached_after_one_was_killed() -> None:
    """A failed write gives the transport a fresh engine, which reaches the other peer at once."""
    first, second = start_peer(), start_peer()
    transport = open_transport("mooncake", "127.0.0.1", "tcp")
    memory = np.ones(1 << 20, dtype=np.uint8)
    transport.register(memory.ctypes.data, memory.nbytes)

    def runs(address: int, count: int = 600) -> Runs:
        steps = np.arange(count, dtype=np.int64) * 1024
        lengths = np.full(count, 512, dtype=np.int64)
        return Runs(memory.ctypes.data + steps, address + steps, lengths)

    try:
        transport.write(first[1], runs(first[2]), 5.0)
        os.kill(first[0].pid, signal.SIGKILL)
        first[0].wait(timeout=5)
        with pytest.raises(TransferFailed, match="could not write"):
            transport.write(first[1], runs(first[2]), 5.0)
        # The time without writes to this peer may have passed by now.
        with pytest.raises(TransferFailed, match=r"nothing was written|does not reach"):
            transport.write(first[1], runs(first[2]), 5.0)
        transport.write(second[1], runs(second[2]), 5.0)
        assert second[0].stdin is not None
        assert second[0].stdout is not None
        print("sum", file=second[0].stdin, flush=True)
        assert int(second[0].stdout.readline()) == 600 * 512
    finally:
        transport.close()
        end_peer(first[0])
        end_peer(second[0])


def test_nothing_lands_after_the_quiet_time_of_a_failed_write() -> None:
    """A frozen peer makes a write fail. The source changes, and the peer resumes: no changed byte lands."""
    process, session, address = start_peer()
    transport = open_transport("mooncake", "127.0.0.1", "tcp")
    memory = np.ones(64 << 20, dtype=np.uint8)
    transport.register(memory.ctypes.data, memory.nbytes)

    def one(length: int) -> Runs:
        return Runs(np.array([memory.ctypes.data]), np.array([address]), np.array([length]))

    try:
        transport.write(session, one(1024), 5.0)
        os.kill(process.pid, signal.SIGSTOP)
        # Rewriting the peer's MiB 60 times fills its sockets' buffers many times over.
        many = Runs(
            memory.ctypes.data + (np.arange(60, dtype=np.int64) << 20),
            np.full(60, address, dtype=np.int64),
            np.full(60, 1 << 20, dtype=np.int64),
        )
        with pytest.raises(TransferFailed):
            transport.write(session, many, 5.0)
        memory[:] = 100
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(transport.quiet_after_failure_s)
        assert process.stdin is not None
        assert process.stdout is not None
        print("sum", file=process.stdin, flush=True)
        assert int(process.stdout.readline()) <= 1 << 20
    finally:
        transport.close()
        end_peer(process)
