"""Runs failed tests with real processes once more, alone, after all others have ended: `pytest --second-run`.

Such a test shares processors, ports and a kernel with others, so it can fail without a fault of the product. One that
passes alone leaves the run green. The summary and `build/flaky.md` name it with its first failure. A failed test of the
folders `unit` and `model` is not repeated, because it uses memory only. Nor are more than MAX failures.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Final

import pytest

MAX: Final = 3
"""Failed tests that a run may repeat."""
REPORT: Final = Path("build/flaky.md")
_IN_MEMORY: Final = ("tests/unit/", "tests/model/")
_LIMIT_S: Final = 900.0
_CATEGORY: Final = "passed alone"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    parser.addoption("--second-run", action="store_true", help=f"repeat up to {MAX} failed tests")


def pytest_configure(config: pytest.Config) -> None:
    """The process that prints the summary repeats tests, not those of pytest-xdist."""
    if config.option.second_run and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondRun(config))


class SecondRun:
    """Collects failures and repeats them at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._root = config.rootpath
        self._failures: dict[str, list[pytest.TestReport]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Stores a failure."""
        if report.failed:
            self._failures.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Repeats the failed tests, and sets the exit status to 0 when they pass."""
        if exitstatus != pytest.ExitCode.TESTS_FAILED or not may_repeat(self._failures):
            return
        command = (sys.executable, "-m", "pytest", "-n0", *self._failures)
        try:
            subprocess.run(command, cwd=self._root, timeout=_LIMIT_S, check=True)
        except subprocess.SubprocessError as error:
            print(f"The second run failed too: {error}")
            return
        session.exitstatus = pytest.ExitCode.OK
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        assert reporter is not None
        for category in ("failed", "error"):
            reporter.stats.pop(category, None)
        reporter.stats[_CATEGORY] = [one for found in self._failures.values() for one in found]
        self._write_report()

    def _write_report(self) -> None:
        file = self._root / REPORT
        file.parent.mkdir(exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:
            for node_id, reports in self._failures.items():
                texts = "\n\n".join(report.longreprtext for report in reports)
                stream.write(f"## {node_id}\n\n```text\n{texts}\n```\n\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the first failures of tests that passed alone."""
        repeated = terminalreporter.stats.get(_CATEGORY, ())
        if repeated:
            terminalreporter.section(f"PASSED ALONE, FAILED BESIDE OTHERS: see {REPORT}")
        for report in repeated:
            terminalreporter.write_line(f"{report.nodeid} ({report.when})")
            terminalreporter.write_line(report.longreprtext)


def may_repeat(node_ids: Collection[str]) -> bool:
    """Whether the failed tests are few, and all of them use real processes."""
    return 0 < len(node_ids) <= MAX and not any(one.startswith(_IN_MEMORY) for one in node_ids)
