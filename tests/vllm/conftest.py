"""Engines for the tests of this folder: at most two at a time, started once."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any, Protocol

import pytest
import pytest_asyncio

from headrace_engine.vllm.compat import set_vllm_environment
from tests.vllm import jobs
from tests.vllm.pair import MODEL, Pair, running_pair

HERE = Path(__file__).parent
_FAILED = pytest.StashKey[bool]()


# Tests of the fixture `pair`.
ON_PAIR = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),
]
# Tests in which this process may import vLLM, and which start no engine.
IMPORTS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.usefixtures("vllm_environment"),
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),
]


def on_services(model: Path) -> list[pytest.MarkDecorator]:
    """Tests of whole deployments of a model, with a state folder of their own."""
    return [
        pytest.mark.vllm,
        pytest.mark.timeout(280),
        pytest.mark.skipif(not model.is_dir(), reason=f"{model} is missing: make test-vllm"),
    ]


class RunJob(Protocol):
    """See jobs.run_job."""

    def __call__(self, job: str, *, model: str, **arguments: object) -> dict[str, Any]: ...


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs jobs in other processes first, before `pair` starts two engines.

    All tests of this folder precede others: engine processes are forked, which must happen before this process uses
    gRPC.
    """

    def place(item: pytest.Item) -> tuple[bool, bool]:
        return not item.path.is_relative_to(HERE), "run_job" not in getattr(
            item, "fixturenames", ()
        )

    items.sort(key=place)


@pytest.fixture(scope="package")
def vllm_environment() -> None:
    """Torch and vLLM read it on their import."""
    set_vllm_environment(host="127.0.0.1", kv_cache_gib=1, rank_count=1)


@pytest.fixture(scope="package")
def run_job() -> RunJob:
    """Runs a job with engines of its own. `model` is a folder of `models`."""

    def run(job: str, *, model: str, **arguments: object) -> dict[str, Any]:
        if not Path("models", model).is_dir():
            pytest.skip(f"the model folder models/{model} is missing: make test-vllm makes it")
        return jobs.run_job(job, model=f"models/{model}", **arguments)

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Stores for the fixtures of a test whether it failed."""
    report = yield
    item.stash[_FAILED] = report.failed
    return report


@pytest_asyncio.fixture(loop_scope="session")
async def pair(shared_pair: Pair, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """The shared engines. A test that fails leaves no request in them."""
    yield shared_pair
    if request.node.stash[_FAILED]:
        await shared_pair.release_all()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def shared_pair() -> AsyncIterator[Pair]:
    """Engines that all tests of the package share."""
    if not MODEL.is_dir():
        pytest.skip(f"the model folder {MODEL} is missing: make model")
    with warnings.catch_warnings():
        # vLLM's imports warn.
        warnings.simplefilter("ignore")
        async with running_pair() as started:
            await started.reset()
            yield started
