"""Which answers move because of the load: planned moves keep every bound, and none is planned back."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.time_model.model import StepTimes, TimeModel
from headrace_kv.layout import WorkerRef
from headrace_router.dispatch.relocation import RunningAnswer, gathered_answer, late_answer
from headrace_router.workers.table import NO_TIMES, Flags, Load, LoadTable, Worker
from tests.sim_layout import LAYOUT

FIXED_S, ANSWER_S, CONTEXT_S = 0.010, 0.004, 1e-6
TIMES = TimeModel(
    StepTimes(
        fixed_s=FIXED_S, s_per_answer=ANSWER_S, s_per_context_token=CONTEXT_S, answer_steps=50
    )
)
SLOTS, BLOCKS = 16, 100_000
Answers = list[RunningAnswer]


def table_of(answers: Answers, count: int, **fields: object) -> LoadTable:
    """`fields` are those of the last worker's load."""
    table = LoadTable(
        Worker(WorkerRef(f"w{row}", "i"), "h:1", "sim", 4_096, SLOTS, LAYOUT)
        for row in range(count)
    )
    for row, worker in enumerate(table.workers):
        own = [one for one in answers if one.row == row]
        load = Load(
            requests=len(own),
            held_tokens=sum(one.tokens for one in own),
            total_tokens=BLOCKS,
            times=TIMES,
        )
        table.set(worker.ref, replace(load, **fields) if fields and row == count - 1 else load)  # type: ignore[arg-type]
    table.times.fill(NO_TIMES.steps)
    return table


def step_s(answers: Answers, row: int) -> float:
    own = [one for one in answers if one.row == row]
    return FIXED_S + len(own) * ANSWER_S + CONTEXT_S * sum(one.tokens for one in own)


def moved(answers: Answers, plan: tuple[int, int]) -> Answers:
    return [
        one._replace(row=plan[1]) if index == plan[0] else one for index, one in enumerate(answers)
    ]


WORKERS = 4
ANY = st.lists(
    st.builds(
        RunningAnswer,
        row=st.integers(0, WORKERS - 1),
        tokens=st.integers(1, 3_000),
        tpot_s=st.sampled_from((0.02, 0.03, 0.05, math.inf)),
        movable=st.booleans(),
    ),
    max_size=30,
)


@given(ANY)
def test_moves_of_late_answers_keep_every_bound_and_end(answers: Answers) -> None:
    for _ in range(2 * len(answers) + 1):
        plan = late_answer(table_of(answers, WORKERS), answers, math.inf)
        if plan is None:
            return
        before, answers = answers, moved(answers, plan)
        one = before[plan[0]]
        assert one.movable
        assert step_s(before, one.row) > min(two.tpot_s for two in before if two.row == one.row)
        at = [two for two in answers if two.row == plan[1]]
        assert step_s(answers, plan[1]) <= 0.9 * min(two.tpot_s for two in at)
        assert len(at) <= 0.9 * SLOTS
    raise AssertionError("answers move to and fro")


def test_a_late_answer_moves_only_where_it_will_be_in_time() -> None:
    answers = [RunningAnswer(0, 100 + n, 0.02) for n in range(4)]
    assert late_answer(table_of(answers, 2), answers, math.inf) == (0, 1)
    for why in (
        {"times": NO_TIMES},
        {"draining": True},
        {"reachable": False},
        {"requests": SLOTS},
        {"held_tokens": BLOCKS},
    ):
        assert late_answer(table_of(answers, 2, **why), answers, math.inf) is None
    # The other worker would keep 0.02 s, and not what its own answers need.
    tight = [*answers, RunningAnswer(1, 100, 0.017)]
    assert late_answer(table_of(tight, 2), tight, math.inf) is None
    # Steps within the bound move nothing.
    two = answers[:2]
    assert late_answer(table_of(two, 2), two, math.inf) is None


def test_a_plan_looks_for_room_for_few_of_many_late_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = [RunningAnswer(row, 10_000 * (row % 2) + 100, 0.011) for row in range(100)]
    table, looks, roomy = table_of(late, 100), list[float](), LoadTable.roomy

    def look(table: LoadTable, answers: float, tokens: float, *bounds: Any) -> Flags:
        looks.append(tokens)
        return roomy(table, answers, tokens, *bounds)

    monkeypatch.setattr(LoadTable, "roomy", look)
    assert late_answer(table, late, math.inf) is None
    # Those with the longest contexts are the latest.
    assert set(looks) == {10_100}
    assert len(looks) <= 16


@given(ANY, st.sampled_from((0.5, 1.0)))
def test_gathering_ends_and_makes_nothing_late(answers: Answers, fill: float) -> None:
    answers = [one._replace(movable=True) for one in answers]
    for _ in range(len(answers) + 1):
        plan = gathered_answer(table_of(answers, WORKERS), answers, math.inf, fill)
        if plan is None:
            break
        before = {row: sum(one.row == row for one in answers) for row in range(WORKERS)}
        assert before[answers[plan[0]].row] <= before[plan[1]]
        answers = moved(answers, plan)
        at = [one for one in answers if one.row == plan[1]]
        assert len(at) <= fill * SLOTS
        assert step_s(answers, plan[1]) <= fill * min(one.tpot_s for one in at)
    else:
        raise AssertionError("answers move to and fro")


def test_few_answers_of_many_workers_end_on_one() -> None:
    answers = [RunningAnswer(row, 100, math.inf) for row in range(WORKERS)]
    for _ in range(WORKERS - 1):
        plan = gathered_answer(table_of(answers, WORKERS), answers, math.inf, 1.0)
        assert plan is not None
        answers = moved(answers, plan)
    assert {one.row for one in answers} == {0}
    assert gathered_answer(table_of(answers, WORKERS), answers, math.inf, 1.0) is None
