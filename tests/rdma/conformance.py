"""The contract of every transport as plain functions, run by pytest, or alone where there is no pytest.

    python -m tests.rdma.conformance --transport mooncake --protocol rdma --host 10.0.0.1

This prints one line per case and exits with 1 when one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import numpy as np

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.plan.copy_plan import Runs
from headrace_kv.transport.base import KvTransport
from tests.rdma.peers import (
    ALLOCATORS,
    PEER_BYTES,
    Bytes,
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
_REST_S = 1.2


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


def part_of(runs: Runs, cut: slice) -> Runs:
    return Runs(runs.source_addresses[cut], runs.destination_addresses[cut], runs.lengths[cut])


@contextlib.contextmanager
def fails(kind: type[Exception] = TransferFailed) -> Iterator[None]:
    """The block must raise this error."""
    try:
        yield
    except kind:
        return
    raise AssertionError("nothing was raised")


def small_runs(harness: Harness) -> None:
    """300 runs of 1,000 bytes land, and no other byte changes."""
    peer = harness.peer
    harness.send(peer, harness.scattered(peer, 300, 1000))


def more_runs_than_any_limit(harness: Harness) -> None:
    """5,000 runs in one write, far more than a library or the kernel takes in one call."""
    peer = harness.peer
    harness.send(peer, harness.scattered(peer, 5000, 517))


def large_runs(harness: Harness) -> None:
    """Long runs of odd lengths and addresses."""
    peer = harness.peer
    runs = harness.runs(peer, [3, 20 << 20], [5, (20 << 20) + 1], [(17 << 20) + 7, (9 << 20) + 3])
    harness.send(peer, runs)


def mixed_lengths(harness: Harness) -> None:
    """Runs from 1 byte to 1 MiB in one write."""
    peer = harness.peer
    lengths = [1, 63, 64 << 10, (64 << 10) + 1, 1 << 20, 7, 255 << 10, 8, 1024, 4096] * 3
    starts = np.cumsum([0, *(length + 11 for length in lengths)])[:-1].tolist()
    runs = harness.runs(peer, starts, [start + 5 for start in starts], lengths)
    harness.send(peer, runs)


def adjacent_runs(harness: Harness) -> None:
    """Adjacent runs, on one side or on both, are copied like any others."""
    peer = harness.peer
    steps = (np.arange(1000) * 512).tolist()
    both = harness.runs(peer, steps, steps, [512] * 1000)
    harness.send(peer, both)
    one = harness.runs(peer, steps, (np.arange(1000) * 1024).tolist(), [512] * 1000)
    peer.zero()
    harness.send(peer, one)


def no_runs(harness: Harness) -> None:
    """An empty write succeeds."""
    peer = harness.peer
    harness.send(peer, harness.runs(peer, [], [], []))


def quiet_at_return(harness: Harness) -> None:
    """The bytes have left the source when `write` returns, so the source may change at once."""
    peer = harness.peer
    kept = harness.memory.get(0, PEER_BYTES)
    runs = harness.runs(peer, [0], [0], [16 << 20])
    harness.write(peer, runs)
    harness.memory.put(0, np.zeros(16 << 20, np.uint8))
    expected: Bytes = np.zeros(PEER_BYTES, np.uint8)
    expected[: 16 << 20] = kept[: 16 << 20]
    try:
        assert peer.digest() == digest_of(expected), "a changed byte has landed"
    finally:
        harness.memory.put(0, kept)


def memory_registered_late(harness: Harness) -> None:
    """Memory that either side registers after the first write is used as well."""
    peer = harness.peer
    harness.write(peer, harness.scattered(peer, 10, 100))
    address = int(peer.command("extra"))
    late = harness.new_memory(1 << 20)
    harness.transport.register(late.address, late.nbytes)
    harness.write(peer, one_run(late.address, address, 1 << 20))
    assert peer.command("extra_digest") == digest_of(late.get(0, 1 << 20))


def unregistered_destination(harness: Harness) -> None:
    """Memory that the peer did not register does not change. The next valid write succeeds."""
    peer = harness.peer
    untouched = peer.command("hidden")
    bad = one_run(harness.memory.address, peer.hidden_address, 4096)
    with fails():
        harness.write(peer, bad)
    time.sleep(_REST_S)
    with fails():
        # Ends one byte beyond the registered range.
        harness.write(peer, harness.runs(peer, [0], [PEER_BYTES - 100], [101]))
    assert peer.command("hidden") == untouched, "unregistered memory was written"
    peer.zero()
    good = harness.scattered(peer, 20, 200)
    harness.write_patiently(peer, good)
    harness.check(peer, good)


def unregistered_source(harness: Harness) -> None:
    """Memory that this side did not register is not read."""
    peer = harness.peer
    other = harness.new_memory(4096)
    with fails():
        harness.write(peer, one_run(other.address, peer.address, 4096))
    harness.check_unchanged(peer)


def nothing_to_register(harness: Harness) -> None:
    """Zero bytes cannot be registered."""
    with fails(ConfigError):
        harness.transport.register(harness.memory.address, 0)


def unknown_peer(harness: Harness) -> None:
    """A write to an unknown session fails soon."""
    start_s = time.monotonic()
    with fails():
        harness.transport.write("127.0.0.1:9", harness.scattered(harness.peer, 2, 10), TIMEOUT_S)
    assert time.monotonic() - start_s < harness.failure_limit_s, "the failure came late"


def no_time_left(harness: Harness) -> None:
    """A write without time fails and changes nothing."""
    peer = harness.peer
    with fails():
        harness.transport.write(peer.session, harness.scattered(peer, 2, 10), 0.0)
    harness.check_unchanged(peer)


def two_peers(harness: Harness) -> None:
    """Two receivers get their own bytes, in turns."""
    first, second = harness.peer, harness.new_peer()
    to_first, to_second = (
        harness.scattered(peer, 64, 3000, seed) for seed, peer in enumerate((first, second))
    )
    for cut in (slice(0, 32), slice(32, 64)):
        for peer, runs in ((first, to_first), (second, to_second)):
            harness.write(peer, part_of(runs, cut))
    harness.check(first, to_first)
    harness.check(second, to_second)


def dead_peer(harness: Harness) -> None:
    """A write to a dead receiver fails. Another receiver is reached at once."""
    other, victim = harness.peer, harness.new_peer()
    runs = harness.scattered(victim, 20, 5000)
    harness.send(victim, runs)
    victim.end()
    for _ in range(2):
        start_s = time.monotonic()
        with fails():
            harness.write(victim, runs)
        assert time.monotonic() - start_s < harness.failure_limit_s, "the failure came late"
    good = harness.scattered(other, 20, 5000)
    harness.send(other, good)


def closed_peer(harness: Harness) -> None:
    """A write to a receiver with a closed transport fails and changes nothing."""
    peer = harness.new_peer()
    runs = harness.scattered(peer, 20, 5000)
    harness.write(peer, runs)
    peer.command("close")
    peer.zero()
    with fails():
        harness.write(peer, runs)
    harness.check_unchanged(peer)


def peer_stands_still(harness: Harness) -> None:
    """A write to a stopped receiver fails in bounded time, or succeeds. After a failure no byte lands."""
    if not harness.crosses_processes:
        return
    peer = harness.new_peer()
    assert isinstance(peer, ProcessPeer)
    runs = harness.runs(peer, [0], [0], [24 << 20])
    harness.write(peer, harness.runs(peer, [0], [0], [1]))
    peer.pause()
    start_s = time.monotonic()
    landed = True
    try:
        harness.write(peer, runs)
    except TransferFailed:
        landed = False
    finally:
        kept = harness.memory.get(0, 24 << 20)
        harness.memory.put(0, np.zeros(24 << 20, np.uint8))
        peer.resume()
    assert time.monotonic() - start_s < harness.failure_limit_s, "the write took too long"
    time.sleep(harness.transport.quiet_after_failure_s)
    after = peer.digest()
    time.sleep(0.3)
    assert peer.digest() == after, "bytes landed after the quiet time"
    harness.memory.put(0, kept)
    if landed:
        harness.check(peer, runs)


def two_senders(harness: Harness) -> None:
    """Two senders write different parts of one receiver."""
    peer = harness.peer
    second = harness.new_transport()
    try:
        second.register(harness.memory.address, harness.memory.nbytes)
        both = harness.scattered(peer, 100, 2000)
        harness.write(peer, part_of(both, slice(0, 50)))
        second.write(peer.session, part_of(both, slice(50, 100)), TIMEOUT_S)
        harness.check(peer, both)
    finally:
        second.close()


def closing(harness: Harness) -> None:
    """A closed transport writes nothing, and can be closed again."""
    peer = harness.peer
    transport = harness.new_transport()
    transport.register(harness.memory.address, harness.memory.nbytes)
    transport.close()
    transport.close()
    with fails():
        transport.write(peer.session, harness.scattered(peer, 2, 10), TIMEOUT_S)
    harness.check_unchanged(peer)


def rearranged(harness: Harness) -> None:
    """Adjacent runs in the peer's order, in this side's order, or in neither: token-outer to head-outer and back."""
    peer = harness.peer
    token, head = (index.ravel() for index in np.indices((512, 24)))
    by_token, by_head = token * 24 + head, head * 512 + token
    for source, destination in (
        (by_token * 400, by_head * 256),
        (by_head * 256, by_token * 400),
        (by_token * 256, by_head * 256),
        (by_token * 400, by_head * 400),
    ):
        runs = harness.runs(peer, source.tolist(), destination.tolist(), [256] * len(token))
        harness.send(peer, runs)
        peer.zero()


def _pieces(runs: Runs, count: int) -> list[Runs]:
    return [part_of(runs, slice(number, None, count)) for number in range(count)]


def many_at_once(harness: Harness) -> None:
    """Writes submitted without waiting all land, short and long ones, and each reports its transport."""
    peer = harness.peer
    short, long = harness.scattered(peer, 4000, 900), harness.scattered(peer, 20, 1 << 20)
    for runs in (short, long):
        peer.zero()
        futures = [
            harness.transport.submit(peer.session, piece, TIMEOUT_S) for piece in _pieces(runs, 10)
        ]
        names = {future.result(TIMEOUT_S).transport.partition("/")[0] for future in futures}
        harness.check(peer, runs)
        assert names == {harness.transport.route(peer.session).partition("/")[0]}, names


def failure_among_many(harness: Harness) -> None:
    """A failing write among others: every future ends, no failed write lands later, and valid writes continue."""
    peer = harness.new_peer()
    good = _pieces(harness.scattered(peer, 600, 3000), 6)
    bad = one_run(harness.memory.address, peer.hidden_address, 4096)
    submit = harness.transport.submit
    before = [submit(peer.session, piece, TIMEOUT_S) for piece in good[:3]]
    wrong = submit(peer.session, bad, TIMEOUT_S)
    after = [submit(peer.session, piece, TIMEOUT_S) for piece in good[3:]]
    with fails():
        wrong.result(harness.failure_limit_s)
    for future in (*before, *after):
        # Both outcomes are correct: a failure may also fail other writes to the same peer.
        with contextlib.suppress(TransferFailed):
            future.result(harness.failure_limit_s)
    time.sleep(harness.transport.quiet_after_failure_s)
    landed = peer.digest()
    time.sleep(0.3)
    assert peer.digest() == landed, "bytes landed after the quiet time"
    peer.zero()
    again = harness.scattered(peer, 30, 3000)
    harness.write_patiently(peer, again)
    harness.check(peer, again)


def deadline_while_under_way(harness: Harness) -> None:
    """Writes to a stopped receiver all end soon after their timeout, and no byte lands afterwards."""
    if not harness.crosses_processes:
        return
    peer = harness.new_peer()
    assert isinstance(peer, ProcessPeer)
    runs = harness.scattered(peer, 8000, 1500)
    harness.write(peer, runs)
    peer.pause()
    start_s = time.monotonic()
    try:
        futures = [harness.transport.submit(peer.session, p, 2.0) for p in _pieces(runs, 6)]
        for future in futures:
            with contextlib.suppress(TransferFailed):
                future.result(harness.failure_limit_s)
    finally:
        peer.resume()
    assert time.monotonic() - start_s < harness.failure_limit_s, "the writes took too long"
    time.sleep(harness.transport.quiet_after_failure_s)
    peer.zero()
    time.sleep(0.3)
    if any(future.exception() for future in futures):
        harness.check_unchanged(peer)


CASES: tuple[Callable[[Harness], None], ...] = (
    small_runs,
    more_runs_than_any_limit,
    large_runs,
    mixed_lengths,
    adjacent_runs,
    rearranged,
    many_at_once,
    no_runs,
    quiet_at_return,
    memory_registered_late,
    unregistered_source,
    nothing_to_register,
    two_peers,
    two_senders,
    closing,
    unregistered_destination,
    unknown_peer,
    no_time_left,
    closed_peer,
    dead_peer,
    failure_among_many,
    deadline_while_under_way,
    peer_stands_still,
)


def main(arguments: list[str]) -> int:
    """Runs the cases and returns the exit status."""
    parser = argparse.ArgumentParser(description="Runs the transport conformance suite.")
    parser.add_argument("--transport", default="mooncake")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--protocol", default="auto")
    parser.add_argument("--memory", default="host", choices=sorted(ALLOCATORS))
    parser.add_argument("--case", action="append", choices=[case.__name__ for case in CASES])
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    harness = Harness(
        PeerSettings(options.transport, options.host, options.protocol, options.memory)
    )
    failed = 0
    try:
        for case in CASES:
            if options.case and case.__name__ not in options.case:
                continue
            start_s = time.monotonic()
            try:
                case(harness)
                result = "ok    "
            except Exception:  # noqa: BLE001 - reported, and counted
                traceback.print_exc()
                failed += 1
                result = "FAILED"
            print(f"{result} {case.__name__} ({time.monotonic() - start_s:.2f} s)", flush=True)
    finally:
        harness.close()
    print(f"{failed} cases failed" if failed else "all cases passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
