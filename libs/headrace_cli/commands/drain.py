"""`headrace drain`: takes a worker out of service without failing a request."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace_cli.addressed import AddressedCommand
from headrace_cli.completion import complete_workers
from headrace_cli.console import answer_console
from headrace_cli.exit_status import run_command
from headrace_cli.json_output import Json, message_object, print_json
from headrace_cli.members.drain import drain_worker
from headrace_cli.options import DEFAULT_ROUTER, Registry, Router
from headrace_cli.starting import WAIT_S, Wait, registry_of
from headrace_common.limits import DRAIN_GRACE_MAX_S


def register(app: typer.Typer) -> None:
    """Adds `headrace drain`."""
    app.command(
        cls=AddressedCommand,
        epilog="Examples:  headrace drain decode-0   |   headrace drain prefill-1 --grace 120 --no-wait",
    )(drain)


def drain(
    worker: Annotated[
        str,
        typer.Argument(
            help="Its id, as `headrace workers` shows it.", autocompletion=complete_workers
        ),
    ],
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    grace: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=DRAIN_GRACE_MAX_S,
            help="Seconds that its requests may take; the rest continues elsewhere. "
            "[default: the worker's drain_grace_s]",
        ),
    ] = None,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return at once, not when the worker has ended.")
    ] = False,
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Ends a worker as SIGTERM does: it rejects new requests, finishes those it has, and exits."""

    async def work() -> None:
        found = await registry_of(router, registry)
        console = None if as_json else answer_console()
        begun = await drain_worker(found, worker, grace, wait=not no_wait, console=console)
        if as_json:
            print_json({"worker": worker, **message_object(begun), "ended": not no_wait})

    run_command(work())
