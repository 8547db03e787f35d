"""The role in a client's certificate: a SPIFFE ID among its subject alternative names.

The form is spiffe://DOMAIN/headrace/ROLE or spiffe://DOMAIN/headrace/ROLE/NAME. See the SPIFFE ID standard of
https://spiffe.io.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from headrace_common.access.roles import ANONYMOUS, Caller, Role

SUBJECT_NAMES: Final = "x509_subject_alternative_name"
"""The key of the names in gRPC's auth context."""
_ID: Final = re.compile(
    r"spiffe://(?P<domain>[a-z0-9._-]{1,255})/headrace/(?P<role>[a-z]+)(/(?P<name>[a-z0-9._-]{1,63}))?"
)


def caller_of_certificate(
    auth_context: Mapping[str, Iterable[bytes]], trust_domain: str = ""
) -> Caller:
    """The caller that a certificate names; ANONYMOUS when it names none, or several.

    An empty `trust_domain` accepts every domain that the certificate authority signs.
    """
    return _caller_of_names(tuple(auth_context.get(SUBJECT_NAMES, ())), trust_domain)


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
