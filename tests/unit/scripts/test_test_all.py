"""The long checks that CI runs for each change."""

from __future__ import annotations

import re

import pytest

import test_all
from test_all import EACH_CHANGE, IN_TURN, LIMITS_S, ROOT, Result, judge, run_each_change


def test_every_target_is_one_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*LIMITS_S, *(target for target, *_ in (*EACH_CHANGE, *IN_TURN))} <= set(targets)


def test_a_failed_target_runs_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []

    def run(target: str, limit_s: float, variables: tuple[str, ...]) -> Result:
        ran.append((target, *variables))
        failed = target == "docs" or (target == "test-kube" and ran.count((target,)) == 1)
        return Result(target, "failed" if failed else "passed", 1, ["a reason"] if failed else [])

    monkeypatch.setattr(test_all, "run", run)
    results = run_each_change(commits=IN_TURN.index(("test-kube",)) + len(IN_TURN))
    assert [one.target for one in results] == [*(target for target, *_ in EACH_CHANGE), "test-kube"]
    assert {one.target: one.result for one in results if one.result == "failed"} == {
        "docs": "failed"
    }
    assert results[-1].notes == ["at first: a reason"]
    assert ran.count(("docs",)) == ran.count(("test-kube",)) == 2


def test_a_target_in_turn_that_its_limit_cuts_off_has_not_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(target: str, limit_s: float, variables: tuple[str, ...]) -> Result:
        in_turn = (target, *variables) == IN_TURN[0]
        return judge(target, None, limit_s, 1, "") if in_turn else Result(target, "passed", 1, [])

    monkeypatch.setattr(test_all, "run", run)
    assert [one.result for one in run_each_change(0)] == ["passed"] * len(EACH_CHANGE) + ["cut off"]
