"""The contract of every transport as plain functions, run by pytest, or alone where there is no pytest.

    python -m tests.rdma.conformance --transport mooncake --protocol rdma --host 10.0.0.1

This prints one line per case and exits with 1 when one failed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Callable

import numpy as np

from headrace_common.errors import ConfigError
from tests.rdma.failures import (
    closed_peer,
    dead_peer,
    deadline_while_under_way,
    failure_among_many,
    no_time_left,
    peer_stands_still,
    unknown_peer,
    unregistered_destination,
    unregistered_source,
)
from tests.rdma.harness import TIMEOUT_S, Harness, fails, one_run, pieces
from tests.rdma.peers import (
    ALLOCATORS,
    PEER_BYTES,
    Bytes,
    PeerSettings,
    digest_of,
)


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


def nothing_to_register(harness: Harness) -> None:
    """Zero bytes cannot be registered."""
    with fails(ConfigError):
        harness.transport.register(harness.memory.address, 0)


def two_peers(harness: Harness) -> None:
    """Two receivers get their own bytes, in turns."""
    first, second = harness.peer, harness.new_peer()
    to_first, to_second = (
        harness.scattered(peer, 64, 3000, seed) for seed, peer in enumerate((first, second))
    )
    for cut in (slice(0, 32), slice(32, 64)):
        for peer, runs in ((first, to_first), (second, to_second)):
            harness.write(peer, runs.select(cut))
    harness.check(first, to_first)
    harness.check(second, to_second)


def two_senders(harness: Harness) -> None:
    """Two senders write different parts of one receiver."""
    peer = harness.peer
    second = harness.new_transport()
    try:
        second.register(harness.memory.address, harness.memory.nbytes)
        both = harness.scattered(peer, 100, 2000)
        harness.write(peer, both.select(slice(0, 50)))
        second.write(peer.session, both.select(slice(50, 100)), TIMEOUT_S)
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


def many_at_once(harness: Harness) -> None:
    """Writes submitted without waiting all land, short and long ones, and each reports its transport."""
    peer = harness.peer
    short, long = harness.scattered(peer, 4000, 900), harness.scattered(peer, 20, 1 << 20)
    for runs in (short, long):
        peer.zero()
        futures = [
            harness.transport.submit(peer.session, piece, TIMEOUT_S) for piece in pieces(runs, 10)
        ]
        names = {future.result(TIMEOUT_S).transport.partition("/")[0] for future in futures}
        harness.check(peer, runs)
        assert names == {harness.transport.name}, names


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
