"""Seals of stored blocks, and the memory that they are stored from."""

from __future__ import annotations

import mmap
import os
import resource

import numpy as np
import pytest

from headrace_common.errors import ConfigError
from headrace_kv.tiers.pool import BATCH_BLOCKS_MAX, PoolKeys, pool_secret
from headrace_kv.tiers.pool_process import (
    PACKET_BYTES_MAX,
    SEAL_BYTES,
    PoolCall,
    SharedArena,
    is_sealed,
    packet_of,
    seal_of,
)
from headrace_kv.transport.memory import PAGE_BYTES
from tests.unit.kv.tiers.test_pool import LAYOUT, SECRET

PAGES = 1_024
CONTENT = memoryview(bytes(range(200)))


def test_a_block_has_the_seal_of_its_name_length_and_deployment() -> None:
    seal = seal_of(SECRET, "a", CONTENT)
    assert len(seal) == SEAL_BYTES
    assert is_sealed(SECRET, "a", CONTENT, seal)
    assert not is_sealed(SECRET, "b", CONTENT, seal)
    assert not is_sealed(SECRET, "a", CONTENT[:-1], seal)
    assert not is_sealed(pool_secret(6), "a", CONTENT, seal)
    # Without the key, all but the tag can be made.
    forged = seal[:32] + seal_of(pool_secret(6), "a", CONTENT)[32:]
    assert not is_sealed(SECRET, "a", CONTENT, forged)


def test_any_changed_byte_breaks_the_seal() -> None:
    seal = seal_of(SECRET, "a", CONTENT)
    stored = bytes(CONTENT) + seal
    for position in range(len(stored)):
        changed = bytearray(stored)
        changed[position] ^= 1
        content, rest = memoryview(changed)[: len(CONTENT)], bytes(changed[len(CONTENT) :])
        assert not is_sealed(SECRET, "a", content, rest)


def test_the_largest_calls_fit_into_a_packet() -> None:
    keys = PoolKeys(SECRET, LAYOUT)
    names = keys.of_shard(0, 1, range(BATCH_BLOCKS_MAX))
    slots = range(10**8, 10**8 + BATCH_BLOCKS_MAX)
    move = PoolCall(2**53, "put", names, memory=99, slots=list(slots))
    assert len(packet_of(move)) < PACKET_BYTES_MAX
    places = [f"{place}{number}" for place in keys.places for number in range(500)]
    query = PoolCall(2**53, "exists", keys.of_prefixes(range(BATCH_BLOCKS_MAX)), places)
    assert len(packet_of(query)) < PACKET_BYTES_MAX


def test_a_mapping_of_a_library_has_its_pages_before_it_is_written() -> None:
    arena = SharedArena(PAGES * PAGE_BYTES)
    library = np.frombuffer(mmap.mmap(arena.descriptor, PAGES * PAGE_BYTES), np.uint8)
    arena.populate_library_mappings()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    library[::PAGE_BYTES] = 7
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < PAGES // 2
    assert (arena.bytes[::PAGE_BYTES] == 7).all()
    arena.close()


def test_memory_that_the_node_refuses_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="lower memory_gib") as refused:
        SharedArena(1 << 62, "memory_gib")
    assert refused.value.metadata["field"] == "memory_gib"


def test_a_closed_arena_stays_readable() -> None:
    arena = SharedArena(PAGE_BYTES)
    descriptor = arena.descriptor
    arena.bytes[:] = 3
    arena.close()
    assert arena.descriptor == -1
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)
    assert (arena.bytes == 3).all()
