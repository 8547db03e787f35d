"""Fixtures of the registry's component tests."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from headrace.registry.v1 import registry_pb2_grpc
from headrace_registry.service import Store
from headrace_registry.store.base import MemoryStore
from headrace_registry.store.etcd_connection import load_etcd3
from tests.component.registry.harness import (
    ETCD,
    EtcdServer,
    Registry,
    registry_stub,
    running_etcd,
    running_registry,
)

_PREFIX_NUMBERS = itertools.count()

# It parses source. A finalizer that formats a traceback at the same time crashes the parser of Python 3.11, and during
# the collection of tests none runs.
load_etcd3()


def _serve_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    if not ETCD.exists():
        pytest.skip(f"needs {ETCD}: apt-get install etcd-server")
    with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


# For all tests that do not stop it: each test has its own prefix. The other is for one test, which may kill it.
shared_etcd = pytest.fixture(_serve_etcd, scope="session", name="shared_etcd")
etcd = pytest.fixture(_serve_etcd, name="etcd")


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    async with running_registry() as registry:
        yield registry


@pytest.fixture
async def stub(registry: Registry) -> AsyncIterator[registry_pb2_grpc.RegistryServiceAsyncStub]:
    async with registry_stub(registry.endpoint) as stub:
        yield stub


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
