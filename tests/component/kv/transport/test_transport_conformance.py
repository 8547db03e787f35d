"""The conformance suite over every transport that runs on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.in_memory_transport import KIND
from tests.rdma.conformance import CASES
from tests.rdma.harness import Harness
from tests.rdma.peers import PeerSettings

TRANSPORTS = [KIND, "mooncake"]


@pytest.fixture(scope="module", params=TRANSPORTS)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    made = Harness(PeerSettings(request.param, protocol="tcp"))
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(harness: Harness, case: Callable[[Harness], None]) -> None:
    case(harness)
