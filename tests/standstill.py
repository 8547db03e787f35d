"""Reruns a test that failed while the whole machine stood still.

Many tests use real clocks: leases that run out, deadlines, limits on durations. On a shared machine all processes may
stop for a second. Such a test has measured the machine and not the code. The summary shows every rerun with its
failure. A test that fails on a running machine is never rerun, and a run has at most twenty reruns (pyproject.toml).
"""

from __future__ import annotations

import time

import pytest

from tests.machine_watch import MachineWatch

WATCH = pytest.StashKey[MachineWatch]()
_REPORT_DELAY_S = 0.1


def pytest_configure(config: pytest.Config) -> None:
    """Every process of pytest-xdist has a watch of its own."""
    config.stash[WATCH] = MachineWatch()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the watch."""
    config.stash[WATCH].close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Time that the machine lost before a test does not count for it."""
    item.config.stash[WATCH].lost_s()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives every test the rule, except under a debugger."""

    def has_shown_nothing(error: BaseException | None) -> bool:
        # A rerun would have no time limit once the limit of the test has struck.
        if error is None or "from pytest-timeout" in str(error):
            return False
        # The watch wakes as late as the test did, and then has to report.
        time.sleep(_REPORT_DELAY_S)
        return config.stash[WATCH].lost_s() > 0

    if not config.option.usepdb:
        for item in items:
            item.add_marker(pytest.mark.flaky(reruns=2, condition=has_shown_nothing))
