"""The statistics and arrivals of bench.goodput."""

from __future__ import annotations

import pytest

from bench.goodput.__main__ import arrivals
from bench.goodput.report import Answer, Objective, attained, goodput, table

OBJECTIVE = Objective(ttft_ms=100.0, tpot_ms=10.0)
GOOD = Answer((100.0, 105.0, 120.0))
LATE = Answer((101.0, 102.0))
SLOW = Answer((50.0, 60.0, 71.0))
CUT = Answer((50.0, 51.0), failed=True)
NONE = Answer((), failed=True)


def test_a_good_request_is_whole_and_keeps_both_bounds() -> None:
    kept = [answer.keeps(OBJECTIVE) for answer in (GOOD, LATE, SLOW, CUT, NONE)]
    assert kept == [True, False, False, False, False]
    assert attained([GOOD, LATE, SLOW, CUT], OBJECTIVE) == 0.25


def test_goodput_is_the_highest_rate_with_enough_good_requests() -> None:
    answers = {
        1.0: {"one": [GOOD] * 10, "two": [GOOD] * 9 + [LATE]},
        2.0: {"one": [GOOD] * 8 + [LATE] * 2, "two": [GOOD] * 9 + [NONE]},
        3.0: {"one": [LATE], "two": [LATE]},
    }
    assert goodput(answers, OBJECTIVE) == {"one": 1.0, "two": 2.0}


def test_the_table_counts_failed_requests_and_times_the_others() -> None:
    rows = table({2.0: {"one": [GOOD, CUT], "two": [NONE]}}, OBJECTIVE).splitlines()
    assert rows[2] == "| 2 | one | 50 % | 100 | 100 | 10 | 10 | 15 | 2 | 1 |"
    assert rows[3] == "| 2 | two | 0 % | - | - | - | - | - | 1 | 1 |"


def test_arrivals_are_those_of_their_seed_and_have_the_rate() -> None:
    drawn = arrivals(20.0, 100.0, (10, 30), 1)
    assert drawn == arrivals(20.0, 100.0, (10, 30), 1)
    assert drawn != arrivals(20.0, 100.0, (10, 30), 2)
    assert len(drawn) == pytest.approx(2_000, rel=0.1)
    assert {one.prompt_tokens for one in drawn} == set(range(10, 31))
    assert 0 <= drawn[0].due_s <= drawn[-1].due_s < 100.0
