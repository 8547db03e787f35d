"""`headrace token`: keys and tokens, by which services and operators prove their role."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from headrace_cli.console import answer_console
from headrace_cli.credentials.files import PUBLIC_MODE, SECRET_MODE, write_new
from headrace_cli.exit_status import failures_as_exit
from headrace_common.access.roles import Role
from headrace_common.access.tokens import create_token, new_private_key, public_key_of
from headrace_common.errors import ConfigError

PRIVATE_KEY_FILE: Final = "token_key.pem"
PUBLIC_KEYS_FILE: Final = "token_keys.pem"
_DAY_S: Final = 86_400.0


def register(app: typer.Typer) -> None:
    """Adds `headrace token keygen` and `headrace token create`."""
    token_app = typer.Typer(no_args_is_help=True, help="Creates keys and role tokens.")
    token_app.command("keygen", epilog="Example:  headrace token keygen credentials")(keygen)
    token_app.command(
        "create",
        epilog="Example:  headrace token create decode --name decode-0 --key credentials/token_key.pem "
        "--output credentials/decode-0.token",
    )(create)
    app.add_typer(token_app, name="token")


def keygen(
    folder: Annotated[Path, typer.Argument(help="Where the two key files are created.")],
) -> None:
    """Creates a private key, which signs tokens, and its public key, for token_keys_file of every service."""
    with failures_as_exit():
        private_key = new_private_key()
        write_new(folder / PRIVATE_KEY_FILE, private_key, SECRET_MODE)
        write_new(folder / PUBLIC_KEYS_FILE, public_key_of(private_key), PUBLIC_MODE)
        answer_console().print(
            f"{folder / PRIVATE_KEY_FILE}: signs tokens; keep it away from every service\n"
            f"{folder / PUBLIC_KEYS_FILE}: verifies them; set token_keys_file of every service to it",
            markup=False,
        )


def create(
    role: Annotated[Role, typer.Argument(help="The role that the token proves.")],
    key: Annotated[Path, typer.Option(help=f"The private key, {PRIVATE_KEY_FILE}.")],
    output: Annotated[Path, typer.Option(help="The file to write. Only its owner may read it.")],
    name: Annotated[
        str, typer.Option(help="Id of the only member that may use it. [default: any]")
    ] = "",
    days: Annotated[float, typer.Option(min=0.001, help="Days until the token expires.")] = 365.0,
) -> None:
    """Writes a token of one role."""
    with failures_as_exit():
        try:
            private_key = key.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"cannot read {key}: {error.strerror}; `headrace token keygen` creates one"
            ) from error
        token = create_token(private_key, role, name, days * _DAY_S)
        write_new(output, f"{token}\n".encode(), SECRET_MODE)
