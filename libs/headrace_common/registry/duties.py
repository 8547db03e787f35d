"""All members of the registry, and which of them compute prompts for others, and which generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc

_BOTH: Final = registry_pb2.Member.ROLE_BOTH
COMPUTE_PROMPTS: Final = (registry_pb2.Member.ROLE_PREFILL, _BOTH)
"""The roles of workers that compute prompts and send their KV."""
GENERATE: Final = (registry_pb2.Member.ROLE_DECODE, _BOTH)
"""The roles of workers that receive KV and generate."""
WORKERS: Final = (registry_pb2.Member.ROLE_PREFILL, *GENERATE)
WorkerRoles: TypeAlias = Mapping[str, registry_pb2.WorkerRole.ValueType]
"""The policy's restrictions of workers of both roles, by worker id."""


def role_by_policy(
    member: registry_pb2.Member,
    worker_roles: WorkerRoles,
) -> registry_pb2.WorkerRole.ValueType:
    """What the policy's `worker_roles` leave of the roles of a member. Those of one role keep it."""
    if member.role != _BOTH:
        return registry_pb2.WORKER_ROLE_BOTH
    return worker_roles.get(member.worker_id, registry_pb2.WORKER_ROLE_BOTH)


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
