"""The transport conformance suite with tensors as memory, staged through host memory on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.rdma.conformance import (
    CASES,
    Harness,
    large_runs,
    mixed_lengths,
    small_runs,
    unregistered_destination,
)
from tests.rdma.peers import PeerSettings

if TYPE_CHECKING:
    from tests.gpu.tensors import TensorHarness

# Each peer of the others imports torch anew.
ACROSS_PROCESSES = (
    small_runs,
    large_runs,
    mixed_lengths,
    unregistered_destination,
)


def opened(transport: str, device: str, *, processes: bool) -> Iterator[TensorHarness]:
    from tests.gpu.tensors import TensorHarness

    settings = PeerSettings(transport, protocol="tcp", memory=device)
    made = TensorHarness(settings, processes=processes)
    yield made
    made.close()


@pytest.fixture(scope="module", params=["in_memory", "mooncake"])
def in_process(device: str, request: pytest.FixtureRequest) -> Iterator[TensorHarness]:
    yield from opened(request.param, device, processes=False)


@pytest.fixture(scope="module", params=["same_host"])
def across_processes(device: str, request: pytest.FixtureRequest) -> Iterator[TensorHarness]:
    yield from opened(request.param, device, processes=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_in_one_process(in_process: TensorHarness, case: Callable[[Harness], None]) -> None:
    case(in_process)


@pytest.mark.parametrize("case", ACROSS_PROCESSES, ids=lambda case: case.__name__)
def test_across_processes(across_processes: TensorHarness, case: Callable[[Harness], None]) -> None:
    case(across_processes)
