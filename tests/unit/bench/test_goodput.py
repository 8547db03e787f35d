"""The statistics and arrivals of bench.goodput."""

from __future__ import annotations

import pytest

from bench.goodput.__main__ import arrivals
from bench.goodput.report import (
    Answer,
    Objective,
    attained,
    goodput,
    goodput_table,
    objectives,
    times_table,
)

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


def test_goodput_is_the_highest_rate_up_to_which_enough_requests_are_good() -> None:
    answers = {
        3.0: {"one": [LATE], "two": [GOOD]},
        1.0: {"one": [GOOD] * 10, "two": [GOOD] * 9 + [LATE]},
        2.0: {"one": [GOOD] * 9 + [NONE], "two": [GOOD] * 8 + [LATE] * 2},
    }
    assert [goodput(answers, way, OBJECTIVE) for way in ("one", "two")] == [2.0, 1.0]
    rows = goodput_table(answers, {"bounds": OBJECTIVE}).splitlines()
    assert rows[2:] == [
        "| bounds | one | 100 % | 90 % | 0 % | 2/s |",
        "| bounds | two | 90 % | 80 % | 100 % | 1/s |",
    ]


def test_bounds_are_multiples_of_the_times_without_load() -> None:
    bounds = objectives([GOOD, GOOD, SLOW])
    assert Objective(ttft_ms=200.0, tpot_ms=40.0) in bounds.values()
    assert "2 x 100 ms, 4 x 10.0 ms" in bounds


def test_the_table_counts_failed_requests_and_times_the_others() -> None:
    rows = times_table({2.0: {"one": [GOOD, CUT], "two": [NONE]}}).splitlines()
    assert rows[2] == "| 2 | one | 100 | 100 | 10 | 10 | 15 | 2 | 1 |"
    assert rows[3] == "| 2 | two | - | - | - | - | - | 1 | 1 |"


def test_arrivals_are_those_of_their_seed_and_have_the_rate() -> None:
    drawn = arrivals(20.0, 100.0, (10, 30), 1)
    assert drawn == arrivals(20.0, 100.0, (10, 30), 1)
    assert drawn != arrivals(20.0, 100.0, (10, 30), 2)
    assert len(drawn) == pytest.approx(2_000, rel=0.1)
    assert {one.prompt_tokens for one in drawn} == set(range(10, 31))
    assert 0 <= drawn[0].due_s <= drawn[-1].due_s < 100.0
