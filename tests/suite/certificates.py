"""An authority for tests and the certificates that it signs."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from headrace_common.access.credentials import TlsFiles

_DAY = dt.timedelta(days=1)


class Authority:
    """Signs certificates for 127.0.0.1. Its files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        built = self._builder(self._name, self._key.public_key())
        certificate = built.add_extension(constraints, critical=True).sign(
            self._key, hashes.SHA256()
        )
        self.file = folder / "authority.pem"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def sign(
        self,
        name: str,
        role: str = "",
        valid_for: dt.timedelta = _DAY,
        hosts: Sequence[str] = (),
        emails: Sequence[str] = (),
    ) -> TlsFiles:
        """Creates a certificate and key for a client and server. An empty `role` means none.

        `hosts` are further names of the server, beside 127.0.0.1. `emails` are names of persons.

        A second call with a name replaces the files of the first.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names: list[x509.GeneralName] = [address, *map(x509.DNSName, hosts)]
        names += map(x509.RFC822Name, emails)
        if role:
            names.append(x509.UniformResourceIdentifier(f"spiffe://tests/headrace/{role}"))
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            self._builder(subject, key.public_key(), valid_for)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        certificate_file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        _replace(certificate_file, certificate.public_bytes(serialization.Encoding.PEM))
        _replace(
            key_file,
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )
        return TlsFiles(str(certificate_file), str(key_file), str(self.file))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, valid_for: dt.timedelta = _DAY
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + valid_for)
        )


def serial_in(files: TlsFiles) -> int:
    """The serial number of the certificate in a file."""
    pem = Path(files.tls_certificate_file).read_bytes()
    return x509.load_pem_x509_certificate(pem).serial_number


async def presented_serial(endpoint: str, client: TlsFiles) -> int:
    """The serial number of the certificate that a server presents in a new handshake."""
    context = ssl.create_default_context(cafile=client.tls_authority_file)
    context.load_cert_chain(client.tls_certificate_file, client.tls_key_file)
    host, _, port = endpoint.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(der).serial_number
    finally:
        writer.transport.abort()


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".draft")
    draft.write_bytes(content)
    draft.replace(path)
