"""The `headrace` command, assembled from its subcommands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final

import typer

from headrace_cli.batch import batch
from headrace_cli.commands.advise import advise
from headrace_cli.commands.chat import chat
from headrace_cli.commands.credentials import (
    create_api_key,
    create_token_file,
    init_authority,
    keygen,
)
from headrace_cli.commands.doctor import doctor
from headrace_cli.commands.incident import replay, save, show
from headrace_cli.commands.planner import explain as explain_plan
from headrace_cli.commands.policy import change_policy, get_policy
from headrace_cli.commands.profile import profile, record
from headrace_cli.commands.route import route
from headrace_cli.commands.simulate import simulate
from headrace_cli.commands.trace import explain, trace
from headrace_cli.commands.up import add, demo, down, up
from headrace_cli.commands.workers import drain, move, reset_cache, status, workers
from headrace_cli.output import register
from headrace_cli.usage import usage
from headrace_common.version import version

app = typer.Typer(
    name="headrace",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# The help lists them in this order.
COMMANDS: Final[Mapping[str, Sequence[Callable[..., None]]]] = {
    "Deployment on this machine": (up, add, down, demo),
    "Requests": (chat, batch, route, trace, explain),
    "Operation": (
        workers,
        status,
        reset_cache,
        drain,
        move,
        usage,
        get_policy,
        change_policy,
        doctor,
        save,
        show,
        replay,
    ),
    "Credentials": (keygen, create_token_file, init_authority, create_api_key),
    "Numbers of workers": (advise, profile, record, simulate, explain_plan),
}
register(app, COMMANDS)


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
