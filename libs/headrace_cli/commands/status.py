"""`headrace status`: the address of the status page, with a token of an operator."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace_cli.client import WAIT_S, Wait, open_router
from headrace_cli.options import DEFAULT_ROUTER, AddressedCommand, Router
from headrace_cli.output import Json, answer_console, print_json, run_command
from headrace_common import ports
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.config import WILDCARD_HOSTS, split_host_port
from headrace_common.errors import ConfigError, NotFound


def register(app: typer.Typer) -> None:
    """Adds `headrace status`."""
    app.command(
        cls=AddressedCommand,
        epilog="Examples:  headrace status   |   headrace status router-0.example:7057 --json",
    )(status)


@run_command
async def status(
    address: Annotated[
        str,
        typer.Argument(
            metavar="[HOST:PORT]",
            help="The router's status_listen; empty means as the router has it.",
        ),
    ] = "",
    router: Router = DEFAULT_ROUTER,
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Prints the address of a router's status page, with this operator's token: keep it secret."""

    found = address or await find_page(router)
    url = page_url(found, Credentials.from_environment(Role.OPERATOR))
    if as_json:
        print_json({"url": url})
    else:
        answer_console().print(url, soft_wrap=True, markup=False, highlight=False)


async def find_page(router: str) -> str:
    """The address of the router's status page. Raises NotFound where it has none."""
    async with open_router(router) as client:
        listen = (await client.listing()).status_endpoint
    host, port = split_host_port(listen) if listen else ("", 0)
    if not port:
        raise NotFound(
            f"the router on {router} has no status page with a fixed port: set its status_listen, as with `headrace "
            f"up --set router.status_listen=127.0.0.1:{ports.ROUTER_STATUS}`",
            metadata={"router": router},
        )
    return f"{split_host_port(router)[0] if host in WILDCARD_HOSTS else host}:{port}"


def page_url(address: str, credentials: Credentials) -> str:
    """The page's URL. Browsers do not send the part with the token. Raises ConfigError."""
    try:
        split_host_port(address)
    except ValueError as error:
        raise ConfigError(f"{address!r} is no address of a status page: {error}") from error
    scheme = "https" if credentials.tls.encrypts else "http"
    token = credentials.page_token(address)
    return f"{scheme}://{address}/" + (f"#token={token}" if token else "")
