"""Engines for the tests of this folder: at most two at a time, started once."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.vllm.pair import MODEL, Pair, running_pair

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These come first: engine processes are forked, and that must happen before other tests start gRPC."""
    items.sort(key=lambda item: not item.path.is_relative_to(HERE))


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def pair() -> AsyncIterator[Pair]:
    """Engines that every test of the package shares."""
    if not MODEL.is_dir():
        pytest.skip(f"the model folder {MODEL} is missing; scripts/prepare_model.py makes it")
    with warnings.catch_warnings():
        # vLLM's imports warn of their own.
        warnings.simplefilter("ignore")
        async with running_pair() as started:
            await started.reset()
            yield started
