"""`headrace explain`: what the best other decisions of the router would have given."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import typer

from headrace_cli.client import WAIT_S, Wait, open_router_internally
from headrace_cli.commands.route import find_internal
from headrace_cli.commands.trace import newest_traces
from headrace_cli.options import DEFAULT_ROUTER, AddressedCommand, Registry, Router, RouterInternal
from headrace_cli.output import (
    Column,
    Json,
    answer_console,
    fitted_table,
    print_json,
    run_command,
)
from headrace_common.trace_view.regret import regrets_of

_COUNTS: Final = (Column(title, right=True) for title in ("requests", "earlier", "sum", "most"))
_COLUMNS: Final = [Column("best other decision"), *_COUNTS, Column("request")]


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
        return
    rows = [
        [
            *(one.other, str(one.request_count), str(one.better_count)),
            *(f"{one.sum_ms:,.0f} ms", f"{one.worst_ms:,.0f} ms", one.worst_request_id),
        ]
        for one in regrets
    ]
    console = answer_console()
    console.print(fitted_table(console, _COLUMNS, rows)[0])
