"""Arenas: alignment and waste."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.errors import ConfigError
from headrace_kv.layout.arena import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    allocate_arena,
    padding_bytes,
    suited_alignment_bytes,
)


@given(address=st.integers(0, 1 << 47), power=st.integers(0, 21))
def test_padding_is_less_than_one_unit(address: int, power: int) -> None:
    padding = padding_bytes(address, 1 << power)
    assert 0 <= padding < 1 << power
    assert (address + padding) % (1 << power) == 0


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
