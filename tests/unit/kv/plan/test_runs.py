"""Lists of runs."""

from __future__ import annotations

import numpy as np

from headrace_kv.runs import Runs, interleave


def part(*starts: int) -> Runs:
    addresses = np.array(starts, np.int64)
    return Runs(addresses, 10 * addresses, addresses + 1)


def as_tuples(runs: Runs) -> list[tuple[int, ...]]:
    arrays = (runs.source_addresses, runs.destination_addresses, runs.lengths)
    return list(zip(*(array.tolist() for array in arrays), strict=True))


def test_the_first_runs_of_all_parts_come_first() -> None:
    mixed = interleave([part(1, 2, 3), part(11, 12, 13)])
    assert as_tuples(mixed) == [(one, 10 * one, one + 1) for one in (1, 11, 2, 12, 3, 13)]


def test_parts_of_unequal_sizes_are_concatenated() -> None:
    mixed = interleave([part(1, 2), part(11)])
    assert as_tuples(mixed) == as_tuples(part(1, 2, 11))
    assert as_tuples(interleave([part(5, 6)])) == as_tuples(part(5, 6))
    assert as_tuples(interleave([part(), part()])) == []
