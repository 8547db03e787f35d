"""`headrace token` and `headrace certs`: keys, tokens and certificates that prove a role."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace_cli.output import answer_console, command, notice_console, option
from headrace_common.access.key_file import load_keys
from headrace_common.access.roles import Role
from headrace_common.access.tokens import HeldToken, new_private_key, public_key_of
from headrace_common.errors import ConfigError
from headrace_common.identity import is_worker_id

SECRET_MODE: Final = 0o600
PUBLIC_MODE: Final = 0o644


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Creates a file. Never replaces one: another process may use it. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists; remove it first, or name another file") from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from error


PRIVATE_KEY_FILE: Final = "token_key.pem"
PUBLIC_KEYS_FILE: Final = "token_keys.pem"
_DAY_S: Final = 86_400.0


@command("token keygen", "headrace token keygen credentials")
def keygen(
    folder: Annotated[Path, typer.Argument(help="Where the two key files are created.")],
) -> None:
    """Creates a private key, which signs tokens, and its public key, for token_keys_file of every service."""
    private_key = new_private_key()
    write_new(folder / PRIVATE_KEY_FILE, private_key, SECRET_MODE)
    write_new(folder / PUBLIC_KEYS_FILE, public_key_of(private_key), PUBLIC_MODE)
    answer_console().print(
        f"{folder / PRIVATE_KEY_FILE}: signs tokens; keep it away from every service\n"
        f"{folder / PUBLIC_KEYS_FILE}: verifies them; set token_keys_file of every service to it",
        markup=False,
    )


@command(
    "token create",
    "headrace token create decode --name decode-0 --key credentials/token_key.pem --output credentials/decode-0.token",
)
def create_token_file(
    role: Annotated[Role, typer.Argument(help="The role that the token proves.")],
    key: Annotated[Path, option(f"The private key, {PRIVATE_KEY_FILE}.")],
    output: Annotated[Path, option("The file to write. Only its owner may read it.")],
    name: Annotated[str, option("Id of the only member that may use it.", show_default="any")] = "",
    days: Annotated[float, option("Days until the token expires.", min=0.001)] = 365.0,
) -> None:
    """Writes a token of one role, and the key by which only its holder can use it."""
    try:
        private_key = key.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {key}: {error.strerror}; `headrace token keygen` creates one"
        ) from error
    held = HeldToken.create(private_key, role, name, days * _DAY_S)
    write_new(output, held.text.encode(), SECRET_MODE)


HOSTS_MAX: Final = 256
DAYS_MAX: Final = 3_650.0
_AUTHORITY_DAYS: Final = 3_650.0
# Clocks of hosts differ.
_EARLY: Final = dt.timedelta(hours=1)
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63}){0,31}")
_DOMAIN_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789._-")


def new_certificates(
    domain: str, hosts: Sequence[str], days: float
) -> tuple[bytes, bytes, dict[Role, tuple[bytes, bytes]]]:
    """The certificate and the key of an authority, valid for ten years, and those that it signs for each role.

    Each of these serves `hosts`, which are names or addresses. All are in PEM. Raises ConfigError for a wrong trust
    domain or host.
    """
    if not 0 < len(domain) <= 255 or not set(domain) <= _DOMAIN_CHARACTERS:
        raise ConfigError(
            f"the trust domain {domain!r} is wrong: use 1 to 255 characters of a-z, 0-9, '.', '_', '-'"
        )
    if not hosts or len(hosts) > HOSTS_MAX:
        raise ConfigError(f"give 1 to {HOSTS_MAX} hosts, by name or address")
    host_names = [*map(_host_name, hosts)]
    issuer = _name(f"Headrace authority of {domain}"[:64])
    issuer_key = ec.generate_private_key(ec.SECP256R1())
    own_identity = x509.UniformResourceIdentifier(f"spiffe://{domain}")
    authority = (
        _builder(issuer, issuer, issuer_key, [own_identity], _AUTHORITY_DAYS)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(issuer_key.public_key()), critical=False
        )
        .sign(issuer_key, hashes.SHA256())
    )

    def signed(role: Role) -> tuple[bytes, bytes]:
        key = ec.generate_private_key(ec.SECP256R1())
        identity = x509.UniformResourceIdentifier(f"spiffe://{domain}/headrace/{role}")
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(_name(role.value), issuer, key, [*host_names, identity], days)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
                critical=False,
            )
            .sign(issuer_key, hashes.SHA256())
        )
        return _pem(certificate, key)

    return *_pem(authority, issuer_key), {role: signed(role) for role in Role}


def _host_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    if not _HOST_NAME.fullmatch(text):
        raise ConfigError(f"the host {text!r} is no name or address: give one such as 10.0.0.7")
    return x509.DNSName(text)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    names: Sequence[x509.GeneralName],
    days: float,
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    is_authority = subject == issuer
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None),
            critical=True,
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=not is_authority,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=is_authority,
                crl_sign=is_authority,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
    )


def _pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> tuple[bytes, bytes]:
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


AUTHORITY_FILE: Final = "authority.pem"
AUTHORITY_KEY_FILE: Final = "authority_key.pem"
CERTIFICATE_FILE: Final = "certificate.pem"
KEY_FILE: Final = "key.pem"
DEFAULT_DOMAIN: Final = "headrace"


@command("certs init", "headrace certs init credentials --host 10.0.0.7 --host 10.0.0.8")
def init_authority(
    folder: Annotated[Path, typer.Argument(help="New folder for the authority and all roles.")],
    host: Annotated[
        list[str],
        option("Name or address that others call; may be repeated.", "--host", metavar="HOST"),
    ],
    trust_domain: Annotated[
        str, option("Name of the deployment in certificates, for tls_trust_domain.")
    ] = DEFAULT_DOMAIN,
    days: Annotated[
        float, option("Days until certificates expire.", min=0.001, max=DAYS_MAX)
    ] = 365.0,
) -> None:
    """Creates an authority, and a folder with certificate, key and authority for each role."""
    certificate, key, roles = new_certificates(trust_domain, host, days)
    write_new(folder / AUTHORITY_KEY_FILE, key, SECRET_MODE)
    write_new(folder / AUTHORITY_FILE, certificate, PUBLIC_MODE)
    for role, (role_certificate, role_key) in roles.items():
        write_new(folder / role / KEY_FILE, role_key, SECRET_MODE)
        write_new(folder / role / CERTIFICATE_FILE, role_certificate, PUBLIC_MODE)
        write_new(folder / role / AUTHORITY_FILE, certificate, PUBLIC_MODE)
    answer_console().print(
        f"{folder / AUTHORITY_KEY_FILE}: signs certificates; keep it away from every service\n"
        f"{folder}/ROLE: {CERTIFICATE_FILE}, {KEY_FILE} and {AUTHORITY_FILE}; give each host the folders of its "
        "services",
        markup=False,
    )


DEFAULT_FILE: Final = Path("credentials/api_keys")
_KEY_BYTES: Final = 24


@command(
    "keys create",
    "headrace keys create team   |   headrace keys create search --file /etc/headrace/api_keys > search.key",
)
def create_api_key(
    tenant: Annotated[str, typer.Argument(help="Tenant that the key belongs to.")],
    file: Annotated[
        Path, option("File for api_keys_file, which gets one more line.", metavar="FILE")
    ] = DEFAULT_FILE,
) -> None:
    """Adds a key to a file, and prints it. A router that has the file as api_keys_file follows within 2 s."""
    key = add_key(file, tenant)
    notice_console().print(
        f"{file} has a key of {tenant}: set api_keys_file of the routers to it; clients send the key",
        markup=False,
    )
    typer.echo(key)


def add_key(file: Path, tenant: str) -> str:
    """Appends a new key of a tenant to a file of keys, and returns it. Raises ConfigError for any other file."""
    if not is_worker_id(tenant):
        raise ConfigError(
            f"{tenant!r} is no name of a tenant: write 1 to 63 characters of a-z, 0-9, '.', '_' and '-'"
        )
    if file.suffix == ".toml":
        raise ConfigError(f"{file} would be TOML: name a file with lines KEY TENANT")
    is_new = not file.exists() or (file.is_file() and not file.stat().st_size)
    if not is_new:
        load_keys(str(file), "the file of keys")
    key = secrets.token_hex(_KEY_BYTES)
    try:
        line = f"{key} {tenant}\n"
        if not is_new and not file.read_text(encoding="utf-8").endswith("\n"):
            line = f"\n{line}"
        file.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        with os.fdopen(os.open(file, flags, SECRET_MODE), "a", encoding="utf-8") as lines:
            lines.write(line)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; name another --file") from error
    return key
