"""One cluster for all tests of this folder. Each test has a namespace of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.kube.cluster import Cluster, require_programs, running_cluster
from tests.kube.node import FakeNode

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_programs()
    with running_cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture
def namespace(cluster: Cluster) -> str:
    name = f"models-{next(_NUMBERS)}"
    cluster.kubectl("create", "namespace", name)
    return name


@pytest.fixture
def node(cluster: Cluster, namespace: str) -> Iterator[FakeNode]:
    found = FakeNode(cluster, namespace)
    found.start()
    yield found
    found.stop()
