"""`headrace status`: the address of the status page, with a token of an operator."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace_cli.output import Json, answer_console, failures_as_exit, print_json
from headrace_common import ports
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.config import split_host_port
from headrace_common.errors import ConfigError

DEFAULT_ADDRESS = f"127.0.0.1:{ports.ROUTER_STATUS}"


def register(app: typer.Typer) -> None:
    """Adds `headrace status`."""
    app.command(
        epilog="Examples:  headrace status   |   headrace status router-0.example:7057 --json",
    )(status)


def status(
    address: Annotated[
        str,
        typer.Argument(metavar="[HOST:PORT]", help="The router's status_listen."),
    ] = DEFAULT_ADDRESS,
    as_json: Json = False,
) -> None:
    """Prints the address of a router's status page, with this operator's token: keep it secret."""
    with failures_as_exit():
        url = page_url(address, Credentials.from_environment(Role.OPERATOR))
        if as_json:
            print_json({"url": url})
        else:
            answer_console().print(url, soft_wrap=True, markup=False, highlight=False)


def page_url(address: str, credentials: Credentials) -> str:
    """The page's URL. Browsers do not send the part with the token. Raises ConfigError."""
    try:
        split_host_port(address)
    except ValueError as error:
        raise ConfigError(f"{address!r} is no address of a status page: {error}") from error
    scheme = "https" if credentials.tls.encrypts else "http"
    token = credentials.token_for(address)
    return f"{scheme}://{address}/" + (f"#token={token}" if token else "")
