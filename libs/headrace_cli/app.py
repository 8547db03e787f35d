"""The `headrace` command, assembled from its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace_cli.commands import (
    chat,
    demo,
    doctor,
    drain,
    pair,
    policy,
    route,
    status,
    trace,
    up,
    workers,
)
from headrace_cli.credentials import certs, token
from headrace_cli.planner import command as planner_command
from headrace_cli.profile import command as profile_command
from headrace_cli.removed import Group
from headrace_cli.simulate import command as simulate_command
from headrace_cli.size import command as size_command
from headrace_common.version import version

app = typer.Typer(
    name="headrace",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# The help lists them in this order.
COMMANDS = (
    *(up, demo, chat, route, workers, drain, trace, status),
    *(pair, policy, token, certs, doctor, size_command, planner_command),
    *(profile_command, simulate_command),
)
for command in COMMANDS:
    command.register(app)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"headrace {version()}")
        raise typer.Exit


@app.callback()
def headrace(
    asked_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Serves large language models with prefill and decode on separate workers."""
