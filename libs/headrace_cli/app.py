"""The `headrace` command, assembled from its subcommands."""

from __future__ import annotations

import re
from typing import Annotated, Final

import typer
from typer.models import CommandInfo, TyperInfo

from headrace_cli import batch, usage
from headrace_cli.commands import (
    advise,
    chat,
    credentials,
    doctor,
    incident,
    pair,
    planner,
    policy,
    profile,
    route,
    simulate,
    trace,
    up,
    workers,
)
from headrace_common.version import version

app = typer.Typer(
    name="headrace",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# The help lists them in this order.
COMMANDS: Final = {
    "Deployment on this machine": (up,),
    "Requests": (chat, batch, route, trace),
    "Operation": (workers, usage, policy, doctor, incident),
    "Credentials": (credentials,),
    "Numbers of workers": (advise, profile, simulate, planner),
    "Stock vLLM": (pair,),
}


def _register_all() -> None:
    """Registers the commands under the headings of COMMANDS, with each example on a line of its own."""
    for heading, modules in COMMANDS.items():
        known = {id(info) for info in _registered(app)}
        for module in modules:
            module.register(app)
        for info in _registered(app):
            if id(info) not in known:
                info.rich_help_panel = heading
                _divide_examples(info)


def _registered(group: typer.Typer) -> list[CommandInfo | TyperInfo]:
    return [*group.registered_commands, *group.registered_groups]


def _divide_examples(info: CommandInfo | TyperInfo) -> None:
    if isinstance(info.epilog, str):
        # Rich's help joins lines, and begins another one at an empty line.
        info.epilog = re.sub(
            r":  |   \|   ", lambda found: f"{found[0].strip(' |')}\n\n", info.epilog
        )
    group = info.typer_instance if isinstance(info, TyperInfo) else None
    if isinstance(group, typer.Typer):
        for inner in (group.info, *_registered(group)):
            _divide_examples(inner)


_register_all()


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
