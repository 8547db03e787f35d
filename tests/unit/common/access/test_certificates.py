"""How long a certificate is valid: until it, or one that it depends on, expires."""

from __future__ import annotations

import datetime as dt

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from headrace_common.access.authorizer import valid_until

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


class Signer:
    """A certificate that may sign others, valid for a number of days."""

    def __init__(self, name: str, days: int, issuer: Signer | None = None) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signer = issuer or self
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(self.name)
            .issuer_name(signer.name)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - dt.timedelta(days=1))
            .not_valid_after(NOW + dt.timedelta(days=days))
            .sign(signer.key, hashes.SHA256())
        )
        self.pem = self.certificate.public_bytes(serialization.Encoding.PEM)


def days_of(certificate: Signer, chain: list[Signer], trusted: list[Signer]) -> int | None:
    end = valid_until(
        certificate.pem,
        b"".join(one.pem for one in chain),
        b"".join(one.pem for one in trusted),
    )
    return (end - NOW).days if end is not None else None


@pytest.mark.parametrize(("own", "between", "root"), [(1, 2, 3), (2, 1, 3), (3, 2, 1)])
def test_the_first_end_on_the_way_to_an_authority_counts(own: int, between: int, root: int) -> None:
    authority = Signer("authority", root)
    intermediate = Signer("intermediate", between, authority)
    leaf = Signer("leaf", own, intermediate)
    assert days_of(leaf, [leaf, intermediate], [authority]) == 1
    assert days_of(leaf, [], [authority]) is None, "the intermediate one is missing"
    assert days_of(leaf, [intermediate], []) is None


def test_the_best_of_several_authorities_counts_and_one_of_the_same_name_does_not() -> None:
    old, new = Signer("authority", 5), Signer("authority", 9)
    leaf = Signer("leaf", 7, old)
    assert days_of(leaf, [], [new, old]) == 5
    assert days_of(leaf, [], [new]) is None
    renewed = Signer("authority", 8, old)
    renewed_leaf = Signer("leaf", 7, renewed)
    assert days_of(renewed_leaf, [renewed], [old, renewed]) == 7


def test_a_chain_is_searched_to_a_bounded_depth() -> None:
    links = [Signer("authority", 9)]
    for number in range(12):
        links.append(Signer(f"link {number}", 9, links[-1]))
    assert days_of(links[4], links[1:4], links[:1]) == 9
    assert days_of(links[-1], links[1:-1], links[:1]) is None


@pytest.mark.parametrize("wrong", [b"", b"nonsense"])
def test_what_is_no_certificate_is_not_valid(wrong: bytes) -> None:
    authority = Signer("authority", 9)
    assert valid_until(wrong, b"", authority.pem) is None
    assert valid_until(authority.pem, b"", wrong) is None
