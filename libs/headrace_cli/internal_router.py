"""The internal listener of a router, as operators find it."""

from __future__ import annotations

from headrace.registry.v1 import registry_pb2
from headrace_cli.client import list_members
from headrace_cli.starting import wait_until_started
from headrace_cli.up.state import find_registry
from headrace_common.errors import NotFound


async def find_internal(internal: str, registry: str, router: str) -> str:
    """The internal address of the router that clients reach at `router`.

    `internal` is the address where the caller knows it. Otherwise the registry has it, at the address `registry`, or in
    the deployment of this machine. Clients may reach the only router of a deployment by other addresses. Raises
    NotFound.
    """
    if internal:
        await wait_until_started(internal)
        return internal
    routers = {
        member.client_endpoint: member.endpoint
        for member in await list_members(registry or find_registry(router))
        if member.role == registry_pb2.Member.ROLE_ROUTER
    }
    if router in routers:
        return routers[router]
    if len(routers) == 1:
        return next(iter(routers.values()))
    known = ", ".join(sorted(routers)) or "none"
    raise NotFound(
        f"no router serves clients on {router}: name one with --router; there are: {known}",
        metadata={"router": router},
    )
