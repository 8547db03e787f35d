"""`headrace explain`: what the best other decisions of the router would have given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import typer
from rich import box
from rich.table import Table

from headrace_cli.client import WAIT_S, Wait, open_router_internally
from headrace_cli.commands.route import find_internal
from headrace_cli.commands.trace import newest_traces
from headrace_cli.options import DEFAULT_ROUTER, AddressedCommand, Registry, Router, RouterInternal
from headrace_cli.output import Json, answer_console, print_json, run_command
from headrace_common.trace_view.regret import Regrets, regrets_of


def register(app: typer.Typer) -> None:
    """Adds `headrace explain`."""
    app.command(
        cls=AddressedCommand, epilog="Examples:  headrace explain   |   headrace explain --json"
    )(explain)


@run_command
async def explain(
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    internal: RouterInternal = "",
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Shows how much earlier first tokens would have come with the best other decisions, by kind."""

    found = await find_internal(internal, registry, router)
    async with open_router_internally(found) as client:
        regrets = regrets_of([trace async for trace in newest_traces(client)])
    if as_json:
        print_json({"regrets": list(map(asdict, regrets))})
    else:
        answer_console().print(regrets_table(regrets))


def regrets_table(regrets: Sequence[Regrets]) -> Table:
    """One row for each kind."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("best other decision")
    for title in ("requests", "earlier", "sum", "most"):
        table.add_column(title, justify="right")
    table.add_column("request", overflow="fold")
    for one in regrets:
        counts = (str(one.request_count), str(one.better_count))
        times = (f"{one.sum_ms:,.0f} ms", f"{one.worst_ms:,.0f} ms")
        table.add_row(one.other, *counts, *times, one.worst_request_id)
    return table
