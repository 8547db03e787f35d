"""A certificate authority for one deployment: makes it, and signs certificates that prove a role."""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace_common.access.roles import Role
from headrace_common.errors import ConfigError
from headrace_common.identity import is_worker_id

HOSTS_MAX: Final = 256
DAYS_MAX: Final = 3_650.0
_AUTHORITY_DAYS: Final = 3_650.0
# Clocks of hosts differ.
_EARLY: Final = dt.timedelta(hours=1)
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63}){0,31}")
_DOMAIN_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789._-")


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate and its private key, both in PEM."""

    certificate: bytes
    key: bytes


def new_authority(domain: str) -> Signed:
    """A certificate authority, valid for ten years. Raises ConfigError for a wrong trust domain."""
    if not 0 < len(domain) <= 255 or not set(domain) <= _DOMAIN_CHARACTERS:
        raise ConfigError(
            f"the trust domain {domain!r} is wrong: use 1 to 255 characters of a-z, 0-9, '.', '_', '-'"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"Headrace authority of {domain}"[:64])
    certificate = (
        _builder(name, name, key.public_key(), _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"spiffe://{domain}")]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    return _pem(certificate, key)


def sign_role(
    authority: Signed, role: Role, name: str, hosts: Sequence[str], days: float
) -> Signed:
    """A certificate that proves a role to servers, and that serves `hosts`, which are names or addresses.

    An empty `name` binds it to no member. Raises ConfigError for a wrong name, host or authority.
    """
    if name and not is_worker_id(name):
        raise ConfigError(
            f"the name {name!r} is no worker id: use 1 to 63 characters of a-z, 0-9, '.', '_', '-'"
        )
    if not hosts or len(hosts) > HOSTS_MAX:
        raise ConfigError(f"give 1 to {HOSTS_MAX} hosts, by name or address")
    issuer, issuer_key = _loaded(authority)
    identity = f"spiffe://{_domain_of(issuer)}/headrace/{role}" + (f"/{name}" if name else "")
    key = ec.generate_private_key(ec.SECP256R1())
    names = [*map(_host_name, hosts), x509.UniformResourceIdentifier(identity)]
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(_name(name or role.value), issuer.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .sign(issuer_key, hashes.SHA256())
    )
    return _pem(certificate, key)


def _loaded(authority: Signed) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate(authority.certificate)
        key = serialization.load_pem_private_key(authority.key, None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the authority cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or (
        key.public_key() != certificate.public_key()
    ):
        raise ConfigError("the authority's key does not belong to its certificate: name both files")
    return certificate, key


def _domain_of(issuer: x509.Certificate) -> str:
    try:
        names = issuer.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    for text in names.get_values_for_type(x509.UniformResourceIdentifier):
        if text.startswith("spiffe://"):
            return text.removeprefix("spiffe://")
    raise ConfigError("the authority names no trust domain: create one with `headrace certs init`")


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
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Signed:
    return Signed(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
