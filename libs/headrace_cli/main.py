"""The `headrace` command, assembled from its subcommands."""

from __future__ import annotations

import typer

from headrace_cli.commands import (
    chat,
    demo,
    doctor,
    drain,
    pair,
    policy,
    route,
    token,
    trace,
    up,
    workers,
)

app = typer.Typer(
    name="headrace",
    help="Serves large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# The help lists them in this order.
for command in (up, demo, chat, route, workers, drain, trace, pair, policy, token, doctor):
    command.register(app)


def main() -> None:
    """Entry point."""
    app()
