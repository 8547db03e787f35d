"""All members of the registry, page by page."""

from __future__ import annotations

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc


async def all_members(
    stub: registry_pb2_grpc.RegistryServiceAsyncStub, timeout_s: float
) -> list[registry_pb2.Member]:
    """The live members, by worker id. Each page has `timeout_s`. Raises AioRpcError."""
    members: list[registry_pb2.Member] = []
    page_token = ""
    while True:
        request = registry_pb2.ListMembersRequest(page_token=page_token)
        page = await stub.ListMembers(request, timeout=timeout_s)
        members += page.members
        page_token = page.next_page_token
        if not page_token:
            return members
