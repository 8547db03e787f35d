"""The options of gRPC that a listener sets."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from headrace_common.client_config import ClientFacingConfig
from headrace_common.rpc.server import ClientServices, GrpcServer


async def test_an_rpc_may_wait_for_a_busy_event_loop_until_its_own_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[dict[str, Any]] = []
    new_server = grpc.aio.server

    def record(**arguments: Any) -> grpc.aio.Server:
        made.append(dict(arguments["options"]))
        return new_server(**arguments)

    monkeypatch.setattr(grpc.aio, "server", record)
    GrpcServer(ClientFacingConfig(insecure=True), (), ClientServices(()))
    # gRPC cancels it after 30 s by default, which no client takes for a reason to try again.
    waits_s = [options["grpc.server_max_unrequested_time_in_server"] for options in made]
    assert waits_s == [3_600, 3_600]
