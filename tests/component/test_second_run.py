"""A failed test runs once more, alone: it protects good changes and must not hide bad ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import second_run

ROOT = Path(second_run.__file__).parents[1]
TESTS = """
import pathlib

import pytest

runs = pathlib.Path("runs.txt")


@pytest.mark.parametrize("number", range({count}))
def test_one(number: int) -> None:
    before = runs.read_text().split() if runs.exists() else []
    runs.write_text(" ".join([*before, str(number)]))
    assert before.count(str(number)) >= {failures}, "too early"
"""


@pytest.mark.parametrize(("failures", "is_green"), [(1, True), (2, False)])
def test_a_failure_that_does_not_repeat_is_green_and_named(
    failures: int, is_green: bool, tmp_path: Path
) -> None:
    test = tmp_path / "tests/suite/test_it.py"
    test.parent.mkdir(parents=True)
    test.write_text(TESTS.format(count=2, failures=failures))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.second_run", "--second-run", str(test)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if is_green else 1), done.stdout + done.stderr
    assert ("2 passed alone" if is_green else "2 failed") in done.stdout.splitlines()[-1]
    report = tmp_path / second_run.REPORT
    assert report.exists() == is_green
    for text in (done.stdout, report.read_text()) if is_green else ():
        assert all(f"tests/suite/test_it.py::test_one[{one}]" in text for one in range(2))
        assert "too early" in text


def test_a_unit_test_or_many_tests_are_not_repeated() -> None:
    names = [f"tests/suite/test_it.py::test_one[{one}]" for one in range(second_run.MAX + 1)]
    assert second_run.may_repeat(names[:-1])
    assert not second_run.may_repeat(names)
    assert not second_run.may_repeat([names[0], "tests/unit/test_it.py::test_one"])
    assert not second_run.may_repeat([])
