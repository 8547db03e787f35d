"""Memory that several mappings share."""

from __future__ import annotations

import mmap
import os
import resource

import numpy as np
import pytest

from headrace_common.errors import ConfigError
from headrace_kv.tiers.pool_process import SharedArena
from headrace_kv.transport.memory import PAGE_BYTES

PAGES = 1_024


def test_a_mapping_of_a_library_has_its_pages_before_it_is_written() -> None:
    arena = SharedArena(PAGES * PAGE_BYTES)
    other = mmap.mmap(arena.descriptor, PAGES * PAGE_BYTES)
    arena.populate_library_mappings()
    library = np.frombuffer(other, np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    library[::PAGE_BYTES] = 7
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < PAGES // 2
    assert (arena.bytes[::PAGE_BYTES] == 7).all()
    arena.close()


def test_memory_that_the_host_refuses_names_the_setting() -> None:
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
