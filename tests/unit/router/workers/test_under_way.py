"""Credit for prompts that a worker is to compute."""

from __future__ import annotations

from array import array

import numpy as np

from headrace_router.workers.table import LoadTable, Worker
from headrace_router.workers.under_way import PromptsUnderWay, PromptUnderWay
from tests.unit.router.prefix_cache.test_cached_prompts import BLOCK_TOKENS, LAYOUT, ref_of

TABLE = LoadTable([Worker(ref_of(number), "a:1", "m", 4_096, 9, LAYOUT) for number in range(3)])
SYSTEM = list(range(100))


def credit(under_way: PromptsUnderWay, *tokens: int, salt: str = "") -> list[float]:
    known = np.array([8.0, 0.0, 0.0])
    found: list[float] = under_way.credited(
        known, TABLE, array("I", [*SYSTEM, *tokens]), salt
    ).tolist()
    assert known.tolist() == [8.0, 0.0, 0.0]
    return found


def test_a_worker_gets_credit_for_whole_blocks_until_it_has_computed_them() -> None:
    under_way = PromptsUnderWay()
    turn = PromptUnderWay(ref_of(1), array("I", [*SYSTEM, 1, 2, 3, 4, 5]), "")
    other = PromptUnderWay(ref_of(2), array("I", [*SYSTEM, 1, 9]), "")
    gone = PromptUnderWay(ref_of(7), array("I", [*SYSTEM, 1, 2]), "")
    for prompt in (turn, other, gone):
        under_way.add(prompt)
    whole = 100 + 5 - (100 + 5) % BLOCK_TOKENS
    assert credit(under_way, 1, 2, 3, 4, 5, 6) == [8.0, whole, 100]
    assert credit(under_way, 1, 2, 3, 4, 5, 6, salt="tenant") == [8.0, 0.0, 0.0]
    under_way.remove(turn)
    assert credit(under_way, 1, 2, 3, 4, 5, 6) == [8.0, 0.0, 100]
    under_way.remove(other)
    under_way.remove(gone)
    assert credit(under_way, 1) == [8.0, 0.0, 0.0]
