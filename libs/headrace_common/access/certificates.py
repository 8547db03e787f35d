"""The role in a client's certificate, and how long the certificate is valid.

The role is a SPIFFE ID among the URIs of its subject alternative names.

The form is spiffe://DOMAIN/headrace/ROLE or spiffe://DOMAIN/headrace/ROLE/NAME. See the SPIFFE ID standard of
https://spiffe.io.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from headrace_common.access.roles import ANONYMOUS, Caller, Role

URI_NAMES: Final = "peer_uri"
"""The key of the certificate's URIs in gRPC's auth context. Its DNS and e-mail names name no role."""
PEER_CERTIFICATE: Final = "x509_pem_cert"
PEER_CHAIN: Final = "x509_pem_cert_chain"
_CHAIN_MAX: Final = 4
"""Most certificates between a client's and that of an authority."""
_ID: Final = re.compile(
    r"spiffe://(?P<domain>[a-z0-9._-]{1,255})/headrace/(?P<role>[a-z]+)(/(?P<name>[a-z0-9._-]{1,63}))?"
)


def caller_of_certificate(
    auth_context: Mapping[str, Iterable[bytes]], trust_domain: str = ""
) -> Caller:
    """The caller that a certificate names; ANONYMOUS when it names none, or several.

    An empty `trust_domain` accepts every domain that the certificate authority signs.
    """
    return _caller_of_names(tuple(auth_context.get(URI_NAMES, ())), trust_domain)


# Every call of a connection has the same names.
@lru_cache(maxsize=1024)
def _caller_of_names(names: tuple[bytes, ...], trust_domain: str) -> Caller:
    callers: set[Caller] = set()
    for raw in names:
        found = _ID.fullmatch(raw.decode("ascii", "replace"))
        if found is None or (trust_domain and found["domain"] != trust_domain):
            continue
        try:
            role = Role(found["role"])
        except ValueError:
            continue
        callers.add(Caller(frozenset({role}), found["name"] or ""))
    return callers.pop() if len(callers) == 1 else ANONYMOUS


# Every call of a connection has the same certificate.
@lru_cache(maxsize=1024)
def valid_until(certificate: bytes, chain: bytes, authorities: bytes) -> datetime | None:
    """When a client's certificate, or one that it depends on, expires. None without a path to an authority.

    All in PEM. `chain` has what the client sent.
    """
    try:
        leaf = x509.load_pem_x509_certificate(certificate)
        between = x509.load_pem_x509_certificates(chain) if chain else []
        trusted = x509.load_pem_x509_certificates(authorities)
    except ValueError:
        return None
    return _end_of_path(leaf, between[:_CHAIN_MAX], trusted)


def _end_of_path(
    certificate: x509.Certificate,
    between: Sequence[x509.Certificate],
    trusted: Sequence[x509.Certificate],
) -> datetime | None:
    ends = [one.not_valid_after_utc for one in trusted if _has_issued(one, certificate)]
    for index, issuer in enumerate(between):
        if _has_issued(issuer, certificate):
            rest = [*between[:index], *between[index + 1 :]]
            end = _end_of_path(issuer, rest, trusted)
            ends += [end] if end is not None else []
    return min(certificate.not_valid_after_utc, max(ends)) if ends else None


def _has_issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    if issuer.subject != certificate.issuer:
        return False
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True
