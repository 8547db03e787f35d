"""`headrace context`: names remote deployments, and chooses the one that commands call."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated, Final

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from headrace_cli.addresses import check_address
from headrace_cli.console import answer_console, notice_console
from headrace_cli.contexts.store import (
    LOCAL,
    Context,
    Contexts,
    changed_contexts,
    check_name,
    contexts_path,
    load_contexts,
)
from headrace_cli.exit_status import failures_as_exit
from headrace_cli.json_output import Json, print_record
from headrace_cli.options import DEFAULT_ROUTER
from headrace_cli.records import ContextRecord, ContextsRecord
from headrace_common.access.addresses import is_loopback
from headrace_common.errors import ConfigError

_SECRET_FILES: Final = ("api_key_file", "token_file", "tls_key_file")
_TLS_FILES: Final = ("tls_authority_file", "tls_certificate_file", "tls_key_file")


def complete_contexts(incomplete: str) -> list[str]:
    """The names that a shell offers."""
    try:
        names = [LOCAL, *load_contexts().by_name]
    except ConfigError:
        return []
    return [name for name in names if name.startswith(incomplete)]


Name = Annotated[str, typer.Argument(help="Its name.", autocompletion=complete_contexts)]
File = Annotated[Path | None, typer.Option(metavar="FILE", help="As HEADRACE_TLS_*_FILE.")]


def register(app: typer.Typer) -> None:
    """Adds `headrace context add`, `list`, `use` and `remove`."""
    context_app = typer.Typer(
        no_args_is_help=True, help="Names remote deployments, and chooses the one to call."
    )
    context_app.command(
        "add",
        epilog="Example:  headrace context add prod --router 10.0.0.5:7050 --registry 10.0.0.5:7051 "
        "--token-file ~/operator.token --tls-authority-file ~/ca.pem",
    )(add)
    context_app.command("list", epilog="Example:  headrace context list")(list_contexts)
    context_app.command(
        "use", epilog="Examples:  headrace context use prod   |   headrace context use local"
    )(use)
    context_app.command("remove", epilog="Example:  headrace context remove prod")(remove)
    app.add_typer(context_app, name="context")


def add(
    name: Annotated[str, typer.Argument(help="Its name.")],
    router: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of a router for clients.")
    ],
    registry: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the registry.")
    ] = "",
    internal: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Internal address of the router.")
    ] = "",
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with one API key.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with an operator's token.")
    ] = None,
    tls_authority_file: File = None,
    tls_certificate_file: File = None,
    tls_key_file: File = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the context of this name.")
    ] = False,
) -> None:
    """Adds a context. It names files with secrets; secrets themselves are in no flag."""
    files = {
        "api_key_file": api_key_file,
        "token_file": token_file,
        "tls_authority_file": tls_authority_file,
        "tls_certificate_file": tls_certificate_file,
        "tls_key_file": tls_key_file,
    }
    with failures_as_exit():
        given = {name: check_file(name, path) for name, path in files.items() if path is not None}
        missing = [name for name in _TLS_FILES if name not in given]
        if missing and given.keys() & {"tls_certificate_file", "tls_key_file"}:
            raise ConfigError(f"{_flag(missing[0])} is missing: name all three files of mutual TLS")
        context = Context(
            check_address("--router", router),
            registry and check_address("--registry", registry),
            internal and check_address("--internal", internal),
            **given,
        )
        check_name(name)
        with changed_contexts() as contexts:
            if name in contexts.by_name and not replace:
                raise ConfigError(f"there is a context {name}: give --replace, or another name")
            contexts.add(name, context)
        if not is_loopback(router) and not tls_authority_file and (api_key_file or token_file):
            notice_console().print(
                "without --tls-authority-file, the key and the token cross the network unencrypted",
                style="yellow",
            )


def check_file(setting: str, path: Path) -> str:
    """The absolute path of a file. Raises ConfigError where this user cannot read it, or where others can.

    The text is in no message: it may be a secret.
    """
    flag = _flag(setting)
    try:
        path = path.expanduser().resolve()
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{flag} names no file that this user can read") from error
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{flag} names no regular file")
    if setting in _SECRET_FILES and stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"{flag}: other users can read {path}: run `chmod 600 {path}`")
    return str(path)


def list_contexts(as_json: Json = False) -> None:
    """Lists the contexts, and marks the one in use."""
    with failures_as_exit():
        contexts = load_contexts()
        if as_json:
            print_record(contexts_record(contexts))
        else:
            answer_console().print(contexts_table(contexts))


def use(name: Name) -> None:
    """Makes a context the one that commands call; `local` is the deployment on this machine."""
    with failures_as_exit(), changed_contexts() as contexts:
        contexts.use(name)


def remove(name: Name) -> None:
    """Removes a context. The files that it names stay."""
    with failures_as_exit(), changed_contexts() as contexts:
        contexts.remove(name)


def contexts_record(contexts: Contexts) -> ContextsRecord:
    """The contexts for programs."""
    return ContextsRecord(
        current=contexts.current or LOCAL,
        file=str(contexts_path()),
        contexts=[
            ContextRecord(
                name,
                one.router,
                one.registry or None,
                one.internal or None,
                one.api_key_file or None,
                one.token_file or None,
                one.tls_authority_file or None,
                one.tls_certificate_file or None,
                one.tls_key_file or None,
            )
            for name, one in sorted(contexts.by_name.items())
        ],
    )


def contexts_table(contexts: Contexts) -> Table:
    """A row for each context, and one for this machine."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("", "context", "router", "registry", "credentials"):
        table.add_column(title, overflow="fold")
    rows = {LOCAL: Context(DEFAULT_ROUTER), **contexts.by_name}
    for name, one in rows.items():
        held = [
            word
            for word, path in (
                ("TLS", one.tls_authority_file),
                ("token", one.token_file),
                ("API key", one.api_key_file),
            )
            if path
        ]
        mark = "*" if name == (contexts.current or LOCAL) else ""
        cells = (mark, name, one.router, one.registry or "-", ", ".join(held) or "-")
        table.add_row(*map(Text, cells))
    return table


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"
