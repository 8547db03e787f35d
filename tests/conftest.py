"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import tempfile

import pytest
from hypothesis import settings

from headrace_common.access.tokens import FOLDER_VARIABLE

pytest_plugins = ["tests.devices", "tests.second_run"]

DEPLOYMENT_FOLDERS = {"suite", "security", "clients"}
STATE_FOLDERS = DEPLOYMENT_FOLDERS | {"vllm", "gpu"}

# Services on loopback sign their tokens with this user's local key. Tests have a key of their own.
_credentials = tempfile.TemporaryDirectory(prefix="headrace-credentials-")
os.environ.setdefault(FOLDER_VARIABLE, _credentials.name)

# A single example may be slow on a busy machine. The timeout of pytest bounds the test.
settings.register_profile("headrace", parent=settings(), deadline=None)
settings.load_profile("headrace")


@pytest.fixture(autouse=True)
def state_folder(request: pytest.FixtureRequest) -> None:
    """Keeps the state files of deployments in the folder of the test."""
    if not STATE_FOLDERS.isdisjoint(request.path.parts):
        state = request.getfixturevalue("tmp_path") / "state"
        request.getfixturevalue("monkeypatch").setenv("XDG_STATE_HOME", str(state))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    parser.addoption("--part", metavar="K/N", help="run part K of N: every Nth file with tests")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> object:
    """Freezes the collected tests, because garbage collection over them takes time in every test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> object:
    """Disables garbage collection during a report. A report parses the source, and a finalizer that parses source at
    the same time crashes the parser of Python 3.11 and the whole run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks tests of whole deployments by their folder."""
    if not DEPLOYMENT_FOLDERS.isdisjoint(item.path.parts):
        item.add_marker(pytest.mark.deployment)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects other parts than the option's, then shares the tests out."""
    if config.option.part:
        part, count = map(int, config.option.part.split("/"))
        files = sorted({item.path for item in items})[part - 1 :: count]
        config.hook.pytest_deselected(items=[item for item in items if item.path not in files])
        items[:] = [item for item in items if item.path in files]
    share_out(items)


def share_out(items: list[pytest.Item]) -> None:
    """Gives every process of pytest-xdist an equal share of the whole deployments first, and quick tests last. So no
    process is left alone with a long test at the end.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    slow = [item for item in items if item.get_closest_marker("deployment")]
    quick = [item for item in items if not item.get_closest_marker("deployment")]
    # pytest-xdist deals out neighbours together, which then share their fixtures.
    cuts = [number * len(quick) // count for number in range(count + 1)]
    items[:] = [
        item
        for number in range(count)
        for item in (*slow[number::count], *quick[cuts[number] : cuts[number + 1]])
    ]
