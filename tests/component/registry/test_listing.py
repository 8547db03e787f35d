"""A listing of members that has several pages."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_cli.client import list_members

_PAGES = {
    "": (["a", "b"], "b"),
    "b": (["c", "d"], "d"),
    "d": (["e"], ""),
}


class PagedRegistry(registry_pb2_grpc.RegistryServiceServicer):
    """Answers ListMembers with at most two members."""

    async def ListMembers(
        self, request: registry_pb2.ListMembersRequest, context: Any
    ) -> registry_pb2.ListMembersResponse:
        names, token = _PAGES[request.page_token]
        members = [registry_pb2.Member(worker_id=name) for name in names]
        return registry_pb2.ListMembersResponse(members=members, next_page_token=token)


@pytest.fixture
async def registry() -> Any:
    server = grpc.aio.server()
    # A command line calls no other RPC here.
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(PagedRegistry(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_commands_read_every_page_of_the_members(registry: str) -> None:
    assert [member.worker_id for member in await list_members(registry)] == list("abcde")
