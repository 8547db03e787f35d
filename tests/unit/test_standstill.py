"""Only a failure during a standstill of the machine is rerun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machine_watch import MachineWatch

ROOT = Path(__file__).resolve().parents[2]
STILL_S = 0.6
# The first run of either fails.
TESTS = """
from tests.standstill import WATCH

runs = {"stood": 0, "ran": 0}

class ManualWatch:
    def __init__(self):
        self.value = 0.0
    def lost_s(self):
        value, self.value = self.value, 0.0
        return value
    def close(self):
        pass

def test_begins(request):
    request.config.stash[WATCH].close()
    request.config.stash[WATCH] = ManualWatch()

def test_stood(request):
    runs["stood"] += 1
    if runs["stood"] == 1:
        request.config.stash[WATCH].value = 0.5
    assert runs["stood"] == 2

def test_ran():
    runs["ran"] += 1
    assert runs["ran"] == 2
"""
FIXTURES = """
from tests.first_failure import FirstFailure
import pytest

start = FirstFailure()
runs = []

@pytest.fixture(scope="session")
def cluster():
    with start.repeated():
        runs.append("start")
        raise AssertionError(f"cause {len(runs)}")

@pytest.mark.parametrize("number", range(3))
def test_needs(cluster, number):
    pass

def test_starts():
    assert len(runs) == 1
"""


@pytest.fixture
def watch() -> Iterator[MachineWatch]:
    watch = MachineWatch()
    yield watch
    watch.close()


def test_a_watch_that_woke_late_reports_the_delay(watch: MachineWatch) -> None:
    watch.process.send_signal(signal.SIGSTOP)
    time.sleep(STILL_S)
    watch.process.send_signal(signal.SIGCONT)
    until_s = time.monotonic() + 10
    while not (lost_s := watch.lost_s()) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert lost_s > STILL_S / 2


def run_tests(folder: Path, tests: str) -> str:
    """What pytest prints of these tests with the rule."""
    (folder / "test_both.py").write_text(tests, encoding="utf-8")
    plugin = 'pytest_plugins = ["tests.standstill"]\n'
    (folder / "conftest.py").write_text(plugin, encoding="utf-8")
    run = subprocess.run(
        (sys.executable, "-m", "pytest", "-q", "--rootdir", folder, folder),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return run.stdout + run.stderr


def test_only_tests_during_a_standstill_are_rerun(tmp_path: Path) -> None:
    output = run_tests(tmp_path, TESTS)
    assert "test_both.py::test_ran" in output
    assert "1 failed, 2 passed, 1 rerun" in output


def test_a_session_fixture_that_failed_starts_no_second_time(tmp_path: Path) -> None:
    output = run_tests(tmp_path, FIXTURES)
    for number in range(3):
        assert f"ERROR test_both.py::test_needs[{number}] - AssertionError: cause 1" in output
    assert "1 passed, 3 errors" in output
