"""Which members of the registry compute prompts for others, and which generate. A worker of both roles does both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

from headrace.registry.v1 import registry_pb2

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
