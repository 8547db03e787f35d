"""`headrace route`: where a prompt would be routed, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.inference.v1 import inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace_cli.client import (
    WAIT_S,
    Wait,
    list_members,
    once_possible,
    open_router_internally,
    registry_of,
    wait_until_started,
)
from headrace_cli.options import (
    DEFAULT_ROUTER,
    AddressedCommand,
    Registry,
    RequestModel,
    Router,
    RouterInternal,
    SystemMessage,
)
from headrace_cli.output import (
    Column,
    Json,
    answer_console,
    command,
    fitted_table,
    message_object,
    print_json,
)
from headrace_client import build_request
from headrace_common.errors import NotFound


@command(
    "route",
    "headrace route 'Why is the sky blue?'",
    cls=AddressedCommand,
)
async def route(
    prompt: Annotated[str, typer.Argument(help="Prompt to route.")],
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    internal: RouterInternal = "",
    model: RequestModel = "",
    system: SystemMessage = "",
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Shows where a prompt would be routed now, and why, without running it."""
    messages = [("system", system)] if system else []

    found = await find_internal(internal, registry, router)
    async with open_router_internally(found) as client:
        routed = await client.explain(
            build_request(messages=[*messages, ("user", prompt)], model=model)
        )
        if as_json:
            print_json(message_object(routed))
        else:
            console = answer_console()
            console.print(route_view(routed, console))


async def find_internal(internal: str, registry: str, router: str) -> str:
    """The internal address of the router that clients reach at `router`.

    `internal` is the address where the caller knows it. Otherwise the registry has it, at the address `registry`, or in
    the deployment of this machine. Clients may reach the only router of a deployment by other addresses. Raises
    NotFound.
    """
    if internal:
        await wait_until_started(internal)
        return internal
    found = await registry_of(router, registry)

    async def find() -> dict[str, str]:
        members = await list_members(found)
        routers = {
            member.client_endpoint: member.endpoint
            for member in members
            if member.role == registry_pb2.Member.ROLE_ROUTER
        }
        if not routers:
            raise NotFound(f"no router is registered with the registry on {found}")
        return routers

    routers = await once_possible(find, NotFound)
    if router in routers:
        return routers[router]
    if len(routers) == 1:
        return next(iter(routers.values()))
    known = ", ".join(sorted(routers))
    raise NotFound(
        f"no router serves clients on {router}: name one with --router; there are: {known}",
        metadata={"router": router},
    )


def route_view(routed: inference_pb2.RouteResponse, console: Console) -> RenderableType:
    """A line, and a row for each candidate, the chosen one first."""
    how = "prefilled by a prefill worker" if routed.remote_prefill else "prefilled there"
    line = Text(f"{routed.worker_id}, {how}: {routed.explanation}")
    return Group(line, candidates_table(routed, console))


def candidates_table(routed: inference_pb2.RouteResponse, console: Console) -> Table:
    """The cost of each candidate, in milliseconds, and what it is from."""
    numbers = ("cost ms", "first token ms", "cached", "missing", "held", "requests")
    columns = [
        *(Column(name) for name in ("decode worker", "prompt on")),
        *(Column(name, right=True) for name in numbers),
        Column("but it is"),
    ]
    rows = [
        (
            candidate.worker_id,
            candidate.prefill_worker_id or "a prefill worker",
            f"{candidate.cost_ms:,.0f}",
            f"{candidate.first_token_ms:,.0f}",
            f"{candidate.cached_tokens:,}",
            f"{candidate.missing_tokens:,}",
            f"{candidate.held_tokens:,}",
            f"{candidate.requests:,}",
            "; ".join(_caveats(candidate)) or "-",
        )
        for candidate in routed.candidates
    ]
    return fitted_table(console, columns, rows)[0]


def _caveats(candidate: inference_pb2.Candidate) -> Iterator[str]:
    if candidate.unfit:
        yield candidate.unfit
    if candidate.prefix_fault:
        yield f"without credit for its cache: {candidate.prefix_fault}"
