"""Free blocks as runs."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_kv.tiers.blocks import FreeRuns

COUNT = 24


def scanned(free: list[bool], count: int) -> list[int]:
    """What `take` returns, found by a scan of all blocks."""
    ids = np.flatnonzero(free)
    runs = np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1)
    fitting = [run for run in runs if len(run) >= count]
    if fitting:
        return list(map(int, min(fitting, key=len)[:count]))
    runs.sort(key=len, reverse=True)
    return list(map(int, np.concatenate(runs)[:count]))


@given(st.lists(st.tuples(st.booleans(), st.randoms(use_true_random=False)), max_size=60))
@settings(max_examples=300, deadline=None)
def test_runs_agree_with_a_scan_of_all_blocks(steps: list[tuple[bool, object]]) -> None:
    runs, free = FreeRuns(COUNT), [True] * COUNT
    for takes, random in steps:
        held = [block for block in range(COUNT) if not free[block]]
        if takes:
            count = random.randint(0, sum(free))  # type: ignore[attr-defined]
            expected = scanned(free, count) if count else []
            assert runs.take(count) == expected
            for block in expected:
                free[block] = False
        else:
            returned = random.sample(held, random.randint(0, len(held)))  # type: ignore[attr-defined]
            runs.add(returned)
            for block in returned:
                free[block] = True
        assert runs.ids() == tuple(np.flatnonzero(free).tolist())
        assert runs.count == sum(free)


def test_no_block_is_free_in_an_empty_pool() -> None:
    runs = FreeRuns(0)
    assert runs.ids() == ()
    assert runs.take(0) == []
