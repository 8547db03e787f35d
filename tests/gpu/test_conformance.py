"""The transport conformance suite with tensors as memory, staged through host memory or in reach of transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.in_memory_transport import KIND
from tests.rdma.conformance import CASES, large_runs, mixed_lengths, small_runs
from tests.rdma.failures import unregistered_destination
from tests.rdma.harness import Harness
from tests.rdma.peers import PeerSettings

if TYPE_CHECKING:
    from tests.gpu.tensors import TensorHarness

# A subset, because each peer process imports torch.
ACROSS_PROCESSES = (small_runs, large_runs, mixed_lengths, unregistered_destination)


def opened(transport: str, device: str, *, processes: bool) -> Iterator[TensorHarness]:
    from tests.gpu.tensors import TensorHarness

    settings = PeerSettings(transport, protocol="tcp", memory=device)
    made = TensorHarness(settings, processes=processes)
    yield made
    made.close()


@pytest.fixture(scope="module", params=[KIND, "mooncake"])
def in_process(device: str, request: pytest.FixtureRequest) -> Iterator[TensorHarness]:
    yield from opened(request.param, device, processes=False)


@pytest.fixture(scope="module", params=["mooncake"])
def across_processes(device: str, request: pytest.FixtureRequest) -> Iterator[TensorHarness]:
    yield from opened(request.param, device, processes=True)


@pytest.fixture(scope="module")
def in_reach() -> Iterator[TensorHarness]:
    pytest.importorskip("torch")
    yield from opened(KIND, "direct", processes=False)


@pytest.mark.vllm
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_memory_in_reach_of_the_transport(
    in_reach: TensorHarness, case: Callable[[Harness], None]
) -> None:
    case(in_reach)


@pytest.mark.vllm
@pytest.mark.parametrize("pair", [("direct", "direct"), ("direct", "cpu"), ("cpu", "direct")])
def test_memory_in_reach_meets_staged_memory(pair: tuple[str, str]) -> None:
    pytest.importorskip("torch")
    from headrace_kv.copy_plan import Runs
    from tests.gpu.tensors import TensorMemory, open_staged

    ends = [(open_staged(PeerSettings(KIND, memory=m)), TensorMemory(8192, m)) for m in pair]
    for transport, memory in ends:
        transport.register(memory.address, memory.nbytes)
    (sender, source), (receiver, target) = ends
    source.put(0, np.random.default_rng(5).integers(0, 256, 8192, np.uint8))
    starts = np.arange(0, 8192, 512, np.int64)
    runs = Runs(source.address + starts, target.address + starts[::-1], np.full(16, 512, np.int64))
    written = sender.write(receiver.session, runs, 5.0)
    got = target.get(0, 8192).reshape(16, 512)
    assert np.array_equal(got, source.get(0, 8192).reshape(16, 512)[::-1])
    # Direct memory needs no copies on its side. Staged memory needs them.
    expected = {("direct", "direct"): {"direct"}, ("direct", "cpu"): {"scatter", "gather_scatter"}}
    assert written.strategy in expected.get(pair, {"gather", "gather_scatter"})
    for transport, _ in ends:
        transport.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_in_one_process(in_process: TensorHarness, case: Callable[[Harness], None]) -> None:
    case(in_process)


@pytest.mark.parametrize("case", ACROSS_PROCESSES, ids=lambda case: case.__name__)
def test_across_processes(across_processes: TensorHarness, case: Callable[[Harness], None]) -> None:
    case(across_processes)
