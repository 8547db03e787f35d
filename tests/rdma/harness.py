"""What the transport conformance suite needs: a sender, its memory, and receivers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np

from headrace_common.errors import TransferFailed
from headrace_kv.copy_plan import Runs
from headrace_kv.transport.base import KvTransport
from tests.rdma.peers import (
    ALLOCATORS,
    PEER_BYTES,
    LocalPeer,
    Memory,
    Peer,
    PeerSettings,
    ProcessPeer,
    digest_of,
    open_settings,
)

TIMEOUT_S = 20.0
# On a real machine, a write to a dead peer must fail within this time.
FAILURE_LIMIT_S = 15.0
_RETRY_S = 6.0
REST_S = 1.2


class Harness:
    """A sender with registered memory, and receivers on demand. Receivers of `in_memory` live in this process.

    `slowness`: how many times slower than real this machine may be, because it is emulated.
    """

    def __init__(self, settings: PeerSettings, slowness: float = 1.0) -> None:
        self.settings = settings
        self.failure_limit_s = FAILURE_LIMIT_S * slowness
        self._write_timeout_s = TIMEOUT_S * slowness
        self._retry_s = _RETRY_S * slowness
        self.crosses_processes = settings.transport != "in_memory"
        self.allocate = ALLOCATORS[settings.memory]
        self._memories: list[Memory] = []
        self.transport = self.new_transport()
        self.memory = self.new_memory(PEER_BYTES)
        self.transport.register(self.memory.address, self.memory.nbytes)
        self._shared: Peer | None = None
        self._peers: list[Peer] = []

    def new_transport(self) -> KvTransport:
        return open_settings(self.settings)

    def new_memory(self, nbytes: int) -> Memory:
        """Memory with random bytes."""
        memory = self.allocate(nbytes)
        # New memory must not overlap memory that was registered before.
        self._memories.append(memory)
        memory.put(0, np.random.default_rng(7).integers(1, 256, nbytes, np.uint8))
        return memory

    @property
    def peer(self) -> Peer:
        """A receiver that cases share, with zeroed memory."""
        if self._shared is None:
            self._shared = self.new_peer()
        self._shared.zero()
        return self._shared

    def new_peer(self) -> Peer:
        """A receiver that the caller may stop or kill."""
        peer = ProcessPeer(self.settings) if self.crosses_processes else self._local_peer()
        self._peers.append(peer)
        return peer

    def _local_peer(self) -> Peer:
        return LocalPeer(self.new_transport(), self.allocate)

    def close(self) -> None:
        self.transport.close()
        for peer in self._peers:
            peer.end()

    def runs(
        self, peer: Peer, sources: list[int], destinations: list[int], lengths: list[int]
    ) -> Runs:
        """Runs from offsets into this side's and the peer's memory."""
        return Runs(
            np.array(sources, np.int64) + self.memory.address,
            np.array(destinations, np.int64) + peer.address,
            np.array(lengths, np.int64),
        )

    def write(self, peer: Peer, runs: Runs) -> None:
        self.transport.write(peer.session, runs, self._write_timeout_s)

    def send(self, peer: Peer, runs: Runs) -> None:
        """Writes, and checks that nothing else has changed."""
        self.write(peer, runs)
        self.check(peer, runs)

    def write_patiently(self, peer: Peer, runs: Runs) -> None:
        """Repeats a write for a while, because a transport may pause after a failure."""
        deadline_s = time.monotonic() + self._retry_s
        while True:
            try:
                self.write(peer, runs)
            except TransferFailed:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.2)
            else:
                return

    def check(self, peer: Peer, runs: Runs) -> None:
        """Compares all of the peer's memory with the bytes that the runs alone should have written."""
        expected = np.zeros(PEER_BYTES, np.uint8)
        for source, destination, length in zip(
            (runs.source_addresses - self.memory.address).tolist(),
            (runs.destination_addresses - peer.address).tolist(),
            runs.lengths.tolist(),
            strict=True,
        ):
            expected[destination : destination + length] = self.memory.get(source, length)
        assert peer.digest() == digest_of(expected), "the peer's memory differs"

    def check_unchanged(self, peer: Peer) -> None:
        """The peer's memory is zero."""
        self.check(peer, self.runs(peer, [], [], []))

    def scattered(self, peer: Peer, count: int, length: int, seed: int = 1) -> Runs:
        """Builds `count` runs in shuffled order on both sides, with gaps between them."""
        random = np.random.default_rng(seed)
        step = PEER_BYTES // count // 8 * 8
        return self.runs(
            peer,
            (random.permutation(count) * step).tolist(),
            (random.permutation(count) * step).tolist(),
            [length] * count,
        )


def one_run(source: int, destination: int, nbytes: int) -> Runs:
    """A run between two addresses."""
    return Runs(np.array([source]), np.array([destination]), np.array([nbytes]))


def pieces(runs: Runs, count: int) -> list[Runs]:
    return [runs.select(slice(number, None, count)) for number in range(count)]


@contextlib.contextmanager
def fails(kind: type[Exception] = TransferFailed) -> Iterator[None]:
    """The block must raise this error."""
    try:
        yield
    except kind:
        return
    raise AssertionError("nothing was raised")
