"""Settings of all tests."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings

pytest_plugins = ["tests.standstill"]

# A single example may well be slow on a busy machine; pytest's timeout bounds the test.
settings.register_profile("headrace", parent=settings(), deadline=None)
settings.load_profile("headrace")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> object:
    """What is collected stays: to look for garbage in it takes time, now and whenever a test makes some."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> object:
    """A report parses the source, and Python 3.11's parser breaks, and with it the whole run, when a finalizer that
    garbage brings about meanwhile parses some too: so there is none.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every process of pytest-xdist starts with its share of the whole deployments, which take long, and all end with
    what is quick: so none is left alone with something long at the end.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = [item for item in items if "suite" in item.path.parts]
    quick = [item for item in items if "suite" not in item.path.parts]
    # It deals out as many neighbours to each, whose fixtures are shared.
    cuts = [number * len(quick) // count for number in range(count + 1)]
    items[:] = [
        item
        for number in range(count)
        for item in (*slow[number::count], *quick[cuts[number] : cuts[number + 1]])
    ]
