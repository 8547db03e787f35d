"""The `headrace` command, assembled from its subcommands, and what replaces those of earlier releases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.models import CommandInfo, TyperInfo

from headrace_cli.commands import (
    chat,
    credentials,
    doctor,
    explain,
    pair,
    planner,
    policy,
    profile,
    route,
    simulate,
    status,
    trace,
    up,
    workers,
)
from headrace_cli.output import failures_as_exit
from headrace_common.errors import ConfigError
from headrace_common.version import version

# By the first words of a command line, the last of which may be an option anywhere in it.
REMOVED: Final[Mapping[tuple[str, str], str]] = {
    ("bench", ""): "use `vllm bench serve`, GuideLLM or AIPerf: docs/load-testing.md",
    (
        "certs create",
        "",
    ): "sign it with openssl, step-ca or cert-manager: docs/security.md#credentials",
    ("context", ""): "write ~/.config/headrace/config.toml: docs/commands.md",
    ("doctor", "--firewall"): "docs/security.md has the rules of a firewall",
    ("doctor", "--pool"): "a worker's log names a remote pool that does not answer",
    ("doctor answer", ""): "test ports with `nc`: docs/operations.md",
    ("doctor peer", ""): "test ports with `nc`: docs/operations.md",
    ("doctor pair", ""): "routers and `headrace workers` name what differs when workers join",
    ("demo", "--tensor-parallel"): "write --tensor-parallel-size",
    ("planner replay", ""): "`headrace simulate --planner` tries other rules: docs/simulator.md",
    ("size", ""): "docs/operations/capacity.md has its formula",
    ("trace", "--html"): "the status page draws traces; --otlp writes a file for tracing tools",
    ("trace", "--perfetto"): "--otlp writes a file for tracing tools",
    ("up", "--restart"): "it is the default; --no-restart ends everything instead",
    ("up", "--tensor-parallel"): "write --tensor-parallel-size",
    ("", "--context"): "name another file by HEADRACE_CONFIG: docs/commands.md",
}


class Group(TyperGroup):
    """Refuses what was removed, and names the replacement."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with failures_as_exit():
            check_words(args)
        return super().parse_args(ctx, args)


def check_words(words: list[str]) -> None:
    """Raises ConfigError for a removed command or option."""
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    for (command, option), remedy in REMOVED.items():
        if command in ("", *words[:1], " ".join(words[:2])) and (not option or option in given):
            name = " ".join(filter(None, (command, option)))
            raise ConfigError(f"`headrace {name}` was removed: {remedy}")


app = typer.Typer(
    name="headrace",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# The help lists them in this order.
COMMANDS: Final = {
    "Deployment on this machine": (up,),
    "Requests": (chat, route, trace, explain),
    "Operation": (workers, status, policy, doctor),
    "Credentials": (credentials,),
    "Numbers of workers": (profile, simulate, planner),
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
