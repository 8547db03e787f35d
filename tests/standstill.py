"""A test that fails while the machine stands still has shown nothing, and runs again.

Many tests wait for real clocks: for leases that run out, for deadlines, for limits on how long something may take.
Where others use the machine as well, all its processes may stop for a second, and such a test has then measured the
machine and not the code. The summary tells of every repetition and what was seen before it. A test that fails on a
machine that ran is never repeated, and twenty repetitions are all that a run may have (pyproject.toml).
"""

from __future__ import annotations

import time

import pytest

from tests.machine_watch import MachineWatch

WATCH = pytest.StashKey[MachineWatch]()
_TOLD_WITHIN_S = 0.1


def pytest_configure(config: pytest.Config) -> None:
    """Every process of pytest-xdist has a watch of its own."""
    config.stash[WATCH] = MachineWatch()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends it."""
    config.stash[WATCH].close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What the machine lost before a test is not that test's."""
    item.config.stash[WATCH].lost_s()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives every test the rule, but under a debugger."""

    def has_shown_nothing(error: BaseException | None) -> bool:
        # A repetition would have no time limit over it once the limit has struck.
        if error is None or "from pytest-timeout" in str(error):
            return False
        # The watch wakes up as late as the test did, and then has yet to tell.
        time.sleep(_TOLD_WITHIN_S)
        return config.stash[WATCH].lost_s() > 0

    if not config.option.usepdb:
        for item in items:
            item.add_marker(pytest.mark.flaky(reruns=2, condition=has_shown_nothing))
