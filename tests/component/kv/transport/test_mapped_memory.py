"""KV memory of decode ranks that are processes of their own, which the decode service maps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from headrace_common.errors import ConfigError, TransferFailed
from headrace_engine.vllm.service.local_broadcast import copy_between, open_broadcast
from headrace_kv.layout import KvDescriptor, KvLayout, RankMemory
from headrace_kv.runs import Runs
from headrace_kv.transport.mapped_memory import SHARED_BYTES_MIN, MappedMemory, share_pages
from headrace_kv.transport.memory import Bytes

ARENA_BYTES = SHARED_BYTES_MIN + 1000
# Shares memory of which the first and the last byte are 1, and prints the bytes at its ends when asked to.
RANK = f"""
import sys
import numpy as np
from headrace_kv.transport.mapped_memory import share_pages
arena = np.zeros({ARENA_BYTES}, np.uint8)
arena[0] = arena[-1] = 1
address = arena.ctypes.data
print(address, share_pages(address, arena.nbytes), flush=True)
for line in sys.stdin:
    print(*arena[:4], *arena[-4:], flush=True)
"""


class Rank:
    """A process with KV memory, and this process's mapping of it."""

    def __init__(self, number: int) -> None:
        self.process = subprocess.Popen(
            (sys.executable, "-c", RANK),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.address, self.descriptor = map(int, self._line().split())
        self.memory = RankMemory(number, "", "", self.address, ARENA_BYTES, ())
        self.mapped = MappedMemory(self.process.pid, self.descriptor, self.memory)

    def ends(self) -> list[int]:
        """The first and the last four bytes, as the process reads them."""
        assert self.process.stdin is not None
        print("ends", file=self.process.stdin, flush=True)
        return list(map(int, self._line().split()))

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def ranks() -> Iterator[tuple[Rank, Rank]]:
    made = (Rank(0), Rank(1))
    yield made
    for rank in made:
        rank.end()


def read(rank: Rank, starts: list[int], lengths: list[int]) -> Bytes:
    target = rank.mapped.allocate(sum(lengths))
    rank.mapped.gather(rank.address + np.array(starts), np.array(lengths), target)
    return target


def test_both_processes_read_what_the_other_writes(ranks: tuple[Rank, Rank]) -> None:
    rank, _ = ranks
    assert rank.ends() == [1, 0, 0, 0, 0, 0, 0, 1]
    assert read(rank, [0, ARENA_BYTES - 1], [1, 1]).tolist() == [1, 1]
    written = np.array([2, 3, 4], np.uint8)
    addresses = rank.address + np.array([1, ARENA_BYTES - 3])
    rank.mapped.scatter(written, addresses, np.array([1, 2]))
    assert rank.ends() == [1, 2, 0, 0, 0, 3, 4, 1]


def test_runs_go_from_one_process_to_another(ranks: tuple[Rank, Rank]) -> None:
    source, destination = ranks
    copy = copy_between({rank.memory.rank: rank.mapped for rank in ranks})
    # From the end to the beginning, with gaps, of two lengths, over the borders of pages.
    starts = np.arange(4 * 4096, 0, -8)
    lengths = np.where(starts % 16, 3, 5)
    sent = np.random.default_rng(1).integers(1, 256, int(lengths.sum()), np.uint8)
    source.mapped.scatter(sent, source.address + starts, lengths)
    runs = Runs(source.address + starts, destination.address + 2 * starts, lengths)
    copy(source.memory, destination.memory, runs, 1.0)
    landed = read(destination, (2 * starts).tolist(), lengths.tolist())
    assert np.array_equal(landed, sent)
    # Nothing else was written.
    whole = read(destination, [1], [ARENA_BYTES - 2])
    assert np.count_nonzero(whole) == len(sent)


def test_a_mapping_outlives_its_process(ranks: tuple[Rank, Rank]) -> None:
    rank, _ = ranks
    rank.end()
    assert read(rank, [0], [1]).tolist() == [1]
    with pytest.raises(TransferFailed, match="cannot be mapped"):
        MappedMemory(rank.process.pid, rank.descriptor, rank.memory)


def test_memory_that_was_not_shared_is_refused(ranks: tuple[Rank, Rank]) -> None:
    rank, _ = ranks
    beyond = replace(rank.memory, arena_bytes=ARENA_BYTES + (1 << 20))
    with pytest.raises(TransferFailed, match="not the memory that it has shared"):
        MappedMemory(rank.process.pid, rank.descriptor, beyond)


def test_memory_that_may_have_no_pages_of_its_own_is_not_shared() -> None:
    small = np.zeros(SHARED_BYTES_MIN - 1, np.uint8)
    with pytest.raises(ConfigError, match="at least 32 MiB"):
        share_pages(small.ctypes.data, small.nbytes)


def test_ranks_copy_to_each_other_where_they_share_heads_and_memory(
    ranks: tuple[Rank, Rank],
) -> None:
    layout = KvLayout.attention(
        model="m",
        dtype="float32",
        layer_count=1,
        kv_head_count=1,
        block_tokens=4,
        parts={"kv": 8},
        tensor_parallel_size=2,
    )
    descriptor = KvDescriptor(layout, tuple(rank.memory for rank in ranks))
    mapped = {rank.memory.rank: rank.mapped for rank in ranks}
    wide, broadcast = open_broadcast(descriptor, mapped)
    assert broadcast is not None
    assert wide == replace(descriptor, layout=replace(layout, broadcast_width=2))
    broadcast.close()

    (group,) = layout.groups
    divided = replace(descriptor, layout=replace(layout, groups=(replace(group, head_count=2),)))
    assert open_broadcast(divided, mapped) == (divided, None)
    # The KV memory of a device is not mapped.
    assert open_broadcast(descriptor, {}) == (descriptor, None)
