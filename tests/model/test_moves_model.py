"""Explores the moves of an answer with workers and routers that end, late messages and clients that leave.

Routers are the product's own; moves.py has the modelled parts. Each test at the end removes one safeguard and shows that
the exploration then finds a violation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.model.explorer import Course, NewWorld, explore, run, run_random
from tests.model.moves import MoveWorld
from tests.model.test_handoff_model import EVERY, describe

AHEADS = (100, 3, 1)
"""From a source that waits for the target to one that ends first."""


def test_the_usual_course_moves_the_answer() -> None:
    outcome = run(MoveWorld, Course())
    assert outcome.violation is None
    assert outcome.log.count("move") == outcome.log.count("send KV from d0") == 1
    assert "wait" not in outcome.log
    assert run(MoveWorld, Course(((12, 1),))).log == run(MoveWorld, Course(((12, 1),))).log


@pytest.mark.parametrize("ahead", AHEADS)
@pytest.mark.parametrize("routers", [1, 2])
def test_one_deviation_at_any_step_violates_nothing(ahead: int, routers: int) -> None:
    search = explore(partial(MoveWorld, ahead, routers), 1)
    assert not search.violations, describe(search)
    assert search.runs > 200


def test_random_courses_with_many_faults_violate_nothing() -> None:
    for seed in range(4_000 // EVERY):
        new_world = partial(MoveWorld, AHEADS[seed % 3], 1 + seed % 2)
        outcome = run_random(new_world, seed, faults=1 + seed % 5)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}: {outcome.log}"
