"""One cluster for all tests of this folder. Each test has a namespace of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.component.chart.custom import DEFINITIONS
from tests.kube.cluster import Cluster, as_list, require_programs, running_cluster
from tests.kube.node import FakeNode

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_programs()
    with ExitStack() as stack:
        found = stack.enter_context(running_cluster(tmp_path_factory.mktemp("cluster")))
        define_custom_resources(found)
        yield found


def define_custom_resources(cluster: Cluster) -> None:
    """Adds the definitions, and returns when the server has accepted them."""
    items = [definition.manifest() for definition in DEFINITIONS]
    cluster.kubectl("create", "--filename", "-", text=as_list(items))
    names = [f"customresourcedefinition/{definition.name}" for definition in DEFINITIONS]
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=50s", *names)


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
