"""Copies between decode ranks that are processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from headrace_common.errors import TransferFailed
from headrace_engine.vllm.service.local_broadcast import open_broadcast
from headrace_kv.layout.layout import KvDescriptor, KvLayout, RankMemory
from headrace_kv.plan.runs import Runs
from headrace_kv.transport.same_host.rank_copies import RankCopies

ARENA_BYTES = 1 << 16
# Prints the address of its memory, and keeps it until its input ends.
PEER = f"""
import ctypes, sys
arena = ctypes.create_string_buffer({ARENA_BYTES})
print(ctypes.addressof(arena), flush=True)
sys.stdin.read()
"""


class Ranks:
    """Two ranks that hold the same head: this process and another one."""

    def __init__(self) -> None:
        self.peer = subprocess.Popen(
            (sys.executable, "-S", "-c", PEER), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.peer.stdout is not None
        self.process_ids = {0: os.getpid(), 1: self.peer.pid}
        self.own = np.random.default_rng(1).integers(1, 256, ARENA_BYTES, np.uint8)
        addresses = (int(self.own.ctypes.data), int(self.peer.stdout.readline()))
        self.memories = tuple(
            RankMemory(rank, "", "", address, ARENA_BYTES, ())
            for rank, address in enumerate(addresses)
        )
        layout = KvLayout.attention(
            model="m",
            dtype="float32",
            layer_count=1,
            kv_head_count=1,
            block_tokens=4,
            parts={"kv": 8},
            tensor_parallel_size=2,
        )
        self.descriptor = KvDescriptor(layout, self.memories)

    def end_peer(self) -> None:
        """Ends the other process and waits for it."""
        self.peer.communicate()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.peer.kill()
    made.peer.__exit__(None, None, None)


def test_runs_go_from_one_process_to_another_and_back(ranks: Ranks) -> None:
    own, peer = ranks.memories
    copies = RankCopies(ranks.process_ids, ranks.memories)
    original = ranks.own.copy()
    # More runs than one system call takes, from the end to the beginning, with gaps, and of two lengths.
    starts = np.arange(4 * 4096, 0, -8)
    lengths = np.where(starts % 16, 3, 5)
    copies(own, peer, Runs(own.base_address + starts, peer.base_address + 2 * starts, lengths), 1.0)
    ranks.own[:] = 0
    copies(peer, own, Runs(peer.base_address + 2 * starts, own.base_address + starts, lengths), 1.0)
    copies.close()
    expected = np.zeros_like(original)
    for start, length in zip(starts, lengths, strict=True):
        expected[start : start + length] = original[start : start + length]
    assert np.array_equal(ranks.own, expected)


def test_a_rank_that_has_ended_is_an_error(ranks: Ranks) -> None:
    own, peer = ranks.memories
    copies = RankCopies(ranks.process_ids, ranks.memories)
    ranks.end_peer()
    runs = Runs(np.array([own.base_address]), np.array([peer.base_address]), np.array([8]))
    with pytest.raises(TransferFailed, match="has ended"):
        copies(own, peer, runs, 1.0)
    copies.close()


def test_ranks_copy_to_each_other_where_they_share_heads_and_can_be_reached(ranks: Ranks) -> None:
    descriptor, process_of = ranks.descriptor, ranks.process_ids.__getitem__
    wide, broadcast = open_broadcast(descriptor, process_of)
    assert broadcast is not None
    assert wide == replace(descriptor, layout=replace(descriptor.layout, broadcast_width=2))
    broadcast.close()

    (group,) = descriptor.layout.groups
    two_heads = replace(descriptor.layout, groups=(replace(group, head_count=2),))
    divided = replace(descriptor, layout=two_heads)
    # The second process has no memory at the end of what it describes.
    beyond = replace(ranks.memories[1], arena_bytes=1 << 46)
    unreachable = replace(descriptor, ranks=(ranks.memories[0], beyond))
    assert open_broadcast(divided, process_of) == (divided, None)
    assert open_broadcast(unreachable, process_of) == (unreachable, None)
    # The KV memory of a device has no process.
    on_device = {0: 0, 1: 0}
    assert open_broadcast(descriptor, on_device.__getitem__) == (descriptor, None)
