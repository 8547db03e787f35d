"""`headrace route`: where a prompt would be routed, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.inference.v1 import inference_pb2
from headrace_cli.client import (
    chat_request,
    open_router_internally,
)
from headrace_cli.console import answer_console
from headrace_cli.exit_status import run_command
from headrace_cli.internal_router import find_internal
from headrace_cli.options import (
    DEFAULT_ROUTER,
    Registry,
    RequestModel,
    Router,
    RouterInternal,
    SystemMessage,
)


def register(app: typer.Typer) -> None:
    """Adds `headrace route`."""
    app.command(
        epilog="Examples:  headrace route 'Why is the sky blue?'   |   "
        "headrace route --explain 'Why is the sky blue?'"
    )(route)


def route(
    prompt: Annotated[str, typer.Argument(help="Prompt to route.")],
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    internal: RouterInternal = "",
    model: RequestModel = "",
    system: SystemMessage = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="List the candidates and the cost of each.")
    ] = False,
) -> None:
    """Shows where a prompt would be routed now, and why, without running it."""
    messages = [("system", system)] if system else []

    async def work() -> None:
        found = await find_internal(internal, registry, router)
        async with open_router_internally(found) as client:
            routed = await client.explain(chat_request([*messages, ("user", prompt)], model=model))
            answer_console().print(route_view(routed, explain=explain))

    run_command(work())


def route_view(routed: inference_pb2.RouteResponse, *, explain: bool) -> RenderableType:
    """One line. With `explain`, also a row for each candidate, the chosen one first."""
    how = "prefilled by a prefill worker" if routed.remote_prefill else "prefilled there"
    line = Text(f"{routed.worker_id}, {how}: {routed.explanation}")
    return Group(line, candidates_table(routed)) if explain else line


def candidates_table(routed: inference_pb2.RouteResponse) -> Table:
    """The cost of each candidate, in tokens."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("decode worker", no_wrap=True)
    for name in ("cost", "cached", "missing", "held", "requests"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("but it is")
    for candidate in routed.candidates:
        table.add_row(
            "*" if candidate.worker_id == routed.worker_id else "",
            candidate.worker_id,
            f"{candidate.cost:,.0f}",
            f"{candidate.cached_tokens:,}",
            f"{candidate.missing_tokens:,}",
            f"{candidate.held_tokens:,}",
            f"{candidate.requests:,}",
            "; ".join(_caveats(candidate)) or "-",
        )
    return table


def _caveats(candidate: inference_pb2.Candidate) -> Iterator[str]:
    if candidate.unfit:
        yield candidate.unfit
    if candidate.prefix_fault:
        yield f"without credit for its cache: {candidate.prefix_fault}"
