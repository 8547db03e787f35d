"""What shells offer for arguments."""

from __future__ import annotations

import asyncio
import os

from headrace.registry.v1 import registry_pb2
from headrace_cli.client import list_members
from headrace_cli.options import DEFAULT_ROUTER, REGISTRY_VARIABLE, ROUTER_VARIABLE
from headrace_cli.state import find_registry
from headrace_common.errors import HeadraceError

_TIMEOUT_S = 1.0


def complete_workers(incomplete: str) -> list[str]:
    """The ids of the workers of the deployment that the environment names, or of that on this machine."""
    try:
        router = os.environ.get(ROUTER_VARIABLE, "") or DEFAULT_ROUTER
        registry = os.environ.get(REGISTRY_VARIABLE, "") or find_registry(router)
        members = asyncio.run(asyncio.wait_for(list_members(registry), _TIMEOUT_S))
    except (HeadraceError, TimeoutError):
        return []
    return [
        member.worker_id
        for member in members
        if member.role != registry_pb2.Member.ROLE_ROUTER
        and member.worker_id.startswith(incomplete)
    ]
