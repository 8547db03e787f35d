"""The failures in the contract of every transport: what a write does that cannot succeed."""

from __future__ import annotations

import contextlib
import time

import numpy as np

from headrace_common.errors import TransferFailed
from tests.rdma.harness import REST_S, TIMEOUT_S, Harness, fails, one_run, pieces
from tests.rdma.peers import PEER_BYTES, ProcessPeer


def unregistered_destination(harness: Harness) -> None:
    """Memory that the peer did not register does not change. The next valid write succeeds."""
    peer = harness.peer
    untouched = peer.command("hidden")
    bad = one_run(harness.memory.address, peer.hidden_address, 4096)
    with fails():
        harness.write(peer, bad)
    time.sleep(REST_S)
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


def failure_among_many(harness: Harness) -> None:
    """A failing write among others: every future ends, no failed write lands later, and valid writes continue."""
    peer = harness.new_peer()
    good = pieces(harness.scattered(peer, 600, 3000), 6)
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
        futures = [harness.transport.submit(peer.session, p, 2.0) for p in pieces(runs, 6)]
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
