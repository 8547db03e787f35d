"""Mooncake with a peer that is frozen."""

from __future__ import annotations

import time

import numpy as np
import pytest

from headrace_common.errors import TransferFailed
from headrace_kv.copy_plan import Runs
from headrace_kv.transport.factory import open_transport
from tests.rdma.harness import one_run
from tests.rdma.peers import PeerSettings, ProcessPeer


def test_nothing_lands_after_the_quiet_time_of_a_failed_write() -> None:
    """A frozen peer makes a write fail. The source changes, and the peer resumes: no changed byte lands."""
    peer = ProcessPeer(PeerSettings("mooncake", protocol="tcp"))
    transport = open_transport("mooncake", "127.0.0.1", "tcp")
    memory = np.ones(64 << 20, dtype=np.uint8)
    transport.register(memory.ctypes.data, memory.nbytes)
    # Rewriting the peer's MiB 60 times fills its sockets' buffers many times over.
    many = Runs(
        memory.ctypes.data + (np.arange(60, dtype=np.int64) << 20),
        np.full(60, peer.address, dtype=np.int64),
        np.full(60, 1 << 20, dtype=np.int64),
    )
    try:
        transport.write(peer.session, one_run(memory.ctypes.data, peer.address, 1024), 5.0)
        peer.pause()
        with pytest.raises(TransferFailed):
            transport.write(peer.session, many, 5.0)
        memory[:] = 100
        peer.resume()
        # A real clock, because Mooncake and the kernel have no other.
        time.sleep(transport.quiet_after_failure_s)
        assert peer.command("largest") == "1"
    finally:
        transport.close()
        peer.end()
