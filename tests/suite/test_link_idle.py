"""The link between a service and its engine stays open while idle."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.engine.v1 import link_pb2
from headrace_engine.vllm.link.messages import reservation_to_proto
from tests.unit.engine.vllm.link.test_link import RESERVATION, attached
from tests.waiting import until

# gRPC closes a connection at the fourth ping that its server does not permit. Pings are 10 s apart.
IDLE_S = 50.0


async def test_an_idle_link_stays_open(tmp_path: Path) -> None:
    async with attached(tmp_path / "link") as ends:
        await asyncio.sleep(IDLE_S)
        assert not ends.lost
        ends.links["scheduler"].send(
            link_pb2.AttachRequest(reserved=reservation_to_proto(RESERVATION))
        )
        await until(lambda: ends.reserved == [RESERVATION])
