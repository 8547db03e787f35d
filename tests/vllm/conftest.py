"""Engines for the tests of this folder: at most two at a time, started once."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.vllm.fork_server import ForkServer
from tests.vllm.pair import MODEL, Pair, running_pair

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These come first: engine processes are forked, and that must happen before other tests start gRPC.

    Before them come jobs in processes of their own, while no other engine runs.
    """

    def place(item: pytest.Item) -> tuple[bool, bool]:
        return not item.path.is_relative_to(HERE), "zygote" not in getattr(item, "fixturenames", ())

    items.sort(key=place)


@pytest.fixture(scope="package")
def zygote() -> Iterator[ForkServer]:
    """Runs jobs with engines of their own."""
    started = ForkServer()
    yield started
    started.close()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def pair() -> AsyncIterator[Pair]:
    """Engines that every test of the package shares."""
    if not MODEL.is_dir():
        pytest.skip(f"the model folder {MODEL} is missing: make setup")
    with warnings.catch_warnings():
        # vLLM's imports warn of their own.
        warnings.simplefilter("ignore")
        async with running_pair() as started:
            await started.reset()
            yield started
