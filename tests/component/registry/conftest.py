"""Fixtures of the registry's component tests."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from headrace_registry.store.base import Store
from headrace_registry.store.memory import MemoryStore
from tests.component.registry.harness import ETCD, EtcdServer, running_etcd

_PREFIX_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd for all tests that do not stop it. Each test has its own prefix."""
    if not ETCD.exists():
        pytest.skip(f"needs {ETCD}: apt-get install etcd-server")
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd for one test, which may kill and restart it."""
    if not ETCD.exists():
        pytest.skip(f"needs {ETCD}: apt-get install etcd-server")
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def etcd_prefix() -> str:
    return f"/test-{next(_PREFIX_NUMBERS)}/"


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.etcd)])
async def store(request: pytest.FixtureRequest, etcd_prefix: str) -> AsyncIterator[Store]:
    """Each kind of store in turn, with a history of 8 changes."""
    made: Store
    if request.param == "memory":
        made = MemoryStore(history_size=8)
    else:
        server: EtcdServer = request.getfixturevalue("shared_etcd")
        made = server.store(etcd_prefix, history_size=8)
    await made.start()
    yield made
    await made.close()
