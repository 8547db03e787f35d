"""Arenas: alignment and waste."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_common.errors import ConfigError
from headrace_kv.transport.memory import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    allocate_arena,
    available_bytes,
    require_available,
    suited_alignment_bytes,
)


@pytest.mark.parametrize("alignment", [1, 64, PAGE_BYTES, HUGE_PAGE_BYTES])
@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 100_001])
def test_arenas_start_at_the_alignment(nbytes: int, alignment: int) -> None:
    arena = allocate_arena(nbytes, alignment)
    assert arena.nbytes == nbytes
    assert arena.ctypes.data % alignment == 0
    assert arena.base is not None
    assert arena.base.nbytes < nbytes + alignment
    arena[-1] = 7
    assert arena[-1] == 7


def test_small_arenas_do_not_take_huge_pages() -> None:
    assert suited_alignment_bytes(100_000) == PAGE_BYTES
    assert suited_alignment_bytes(1 << 30) == HUGE_PAGE_BYTES


@pytest.mark.parametrize("nbytes, alignment", [(0, 64), (-1, 64), (8, 0), (8, 3), (8, -4)])
def test_impossible_sizes_and_alignments_are_rejected(nbytes: int, alignment: int) -> None:
    with pytest.raises(ConfigError):
        allocate_arena(nbytes, alignment)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        # The host has 8,000 KiB, and the container uses 1,000 KiB besides 500 KiB of files.
        (None, 8_000),
        ("max", 8_000),
        (str(3_000 << 10), 2_000),
        (str(90_000 << 10), 8_000),
    ],
)
def test_the_host_and_the_container_limit_memory(
    tmp_path: Path, limit: str | None, expected: int
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:  8000 kB\nHugePages_Total:  0\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{1_500 << 10}\n")
        (tmp_path / "memory.stat").write_text(f"anon {1_000 << 10}\ninactive_file {500 << 10}\n")
    assert available_bytes(meminfo, tmp_path) == expected << 10


def test_more_memory_than_there_is_names_the_setting() -> None:
    assert 0 < available_bytes() < 1 << 50
    require_available(PAGE_BYTES, "kv_host_gib")
    with pytest.raises(ConfigError, match="are available: lower kv_host_gib") as refused:
        require_available(1 << 60, "kv_host_gib")
    assert refused.value.metadata == {"field": "kv_host_gib"}
