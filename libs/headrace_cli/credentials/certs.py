"""`headrace certs`: an authority and the certificates of a deployment's roles, for mutual TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from headrace_cli.console import answer_console
from headrace_cli.credentials.authority import DAYS_MAX, Signed, new_authority, sign_role
from headrace_cli.credentials.files import PUBLIC_MODE, SECRET_MODE, write_new
from headrace_cli.exit_status import failures_as_exit
from headrace_common.access.roles import Role
from headrace_common.errors import ConfigError

AUTHORITY_FILE: Final = "authority.pem"
AUTHORITY_KEY_FILE: Final = "authority_key.pem"
CERTIFICATE_FILE: Final = "certificate.pem"
KEY_FILE: Final = "key.pem"
DEFAULT_DOMAIN: Final = "headrace"
_FILE_BYTES_MAX: Final = 1 << 20

Folder = Annotated[Path, typer.Argument(help="Folder of the authority.")]
Hosts = Annotated[
    list[str],
    typer.Option(
        "--host", metavar="HOST", help="Name or address that others call; may be repeated."
    ),
]
Days = Annotated[
    float, typer.Option(min=0.001, max=DAYS_MAX, help="Days until certificates expire.")
]


def register(app: typer.Typer) -> None:
    """Adds `headrace certs init` and `headrace certs create`."""
    certs_app = typer.Typer(
        no_args_is_help=True, help="Creates certificates of roles, for mutual TLS."
    )
    certs_app.command(
        "init", epilog="Example:  headrace certs init credentials --host 10.0.0.7 --host 10.0.0.8"
    )(init)
    certs_app.command(
        "create",
        epilog="Example:  headrace certs create credentials decode --name decode-1 --host 10.0.0.9 "
        "--output credentials/decode-1",
    )(create)
    app.add_typer(certs_app, name="certs")


def init(
    folder: Annotated[Path, typer.Argument(help="New folder for the authority and all roles.")],
    host: Hosts,
    trust_domain: Annotated[
        str, typer.Option(help="Name of the deployment in certificates, for tls_trust_domain.")
    ] = DEFAULT_DOMAIN,
    days: Days = 365.0,
) -> None:
    """Creates an authority, and a folder with certificate, key and authority for each role."""
    with failures_as_exit():
        authority = new_authority(trust_domain)
        signed = {role: sign_role(authority, role, "", host, days) for role in Role}
        write_new(folder / AUTHORITY_KEY_FILE, authority.key, SECRET_MODE)
        write_new(folder / AUTHORITY_FILE, authority.certificate, PUBLIC_MODE)
        for role, one in signed.items():
            _write(folder / role, one, authority.certificate)
        answer_console().print(
            f"{folder / AUTHORITY_KEY_FILE}: signs certificates; keep it away from every service\n"
            f"{folder}/ROLE: {CERTIFICATE_FILE}, {KEY_FILE} and {AUTHORITY_FILE}; give each host the folders of its "
            "services",
            markup=False,
        )


def create(
    folder: Folder,
    role: Annotated[Role, typer.Argument(help="The role that the certificate proves.")],
    host: Hosts,
    output: Annotated[Path, typer.Option(help="New folder for certificate, key and authority.")],
    name: Annotated[
        str, typer.Option(help="Id of the only member that may use it. [default: any]")
    ] = "",
    days: Days = 365.0,
) -> None:
    """Signs a certificate of one role, such as that of a further host or of a member with a name."""
    with failures_as_exit():
        authority = Signed(_read(folder / AUTHORITY_FILE), _read(folder / AUTHORITY_KEY_FILE))
        _write(output, sign_role(authority, role, name, host, days), authority.certificate)


def _write(folder: Path, signed: Signed, authority: bytes) -> None:
    write_new(folder / KEY_FILE, signed.key, SECRET_MODE)
    write_new(folder / CERTIFICATE_FILE, signed.certificate, PUBLIC_MODE)
    write_new(folder / AUTHORITY_FILE, authority, PUBLIC_MODE)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_FILE_BYTES_MAX)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; `headrace certs init` creates one"
        ) from error
