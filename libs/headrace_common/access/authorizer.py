"""Decides for an internal listener which caller an RPC has, and whether that caller may make it.

The role in a certificate is a SPIFFE ID among the URIs of its subject alternative names. The form is
spiffe://DOMAIN/headrace/ROLE or spiffe://DOMAIN/headrace/ROLE/NAME. See the SPIFFE ID standard of https://spiffe.io.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

from headrace_common.access.credentials import TlsFiles, audience_of
from headrace_common.access.roles import (
    ANONYMOUS,
    PROOF_KEY,
    TOKEN_KEY,
    TRUSTED,
    Caller,
    Role,
    caller_with,
)
from headrace_common.access.table import needs_role, roles_of
from headrace_common.access.tls import TlsIdentity, tls_identity
from headrace_common.access.tokens import TokenVerifier, load_local_key, public_key_of
from headrace_common.errors import ConfigError, PermissionDenied, Unauthenticated
from headrace_common.reloading import ReloadedFiles, read_text

if TYPE_CHECKING:
    from headrace_common.config import ServiceConfig

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
        callers.add(caller_with(role, found["name"] or ""))
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


CREDENTIAL_CHECK_S: Final = 60.0
"""Seconds between two checks of the API key, token or certificate of an open call."""


class Rechecked:
    """Calls `check` at this interval while the block runs. Ends the block with the error that it raises."""

    __slots__ = ("_check", "_interval_s", "_refusal", "_task", "_timer")

    def __init__(self, check: Callable[[], object], interval_s: float) -> None:
        self._check = check
        self._interval_s = interval_s
        self._refusal: Exception | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a call runs in a task"
        self._task = task
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._check_again)

    def _check_again(self) -> None:
        try:
            self._check()
        # An error of the check itself ends the call too: without checks it could go on for ever.
        except Exception as error:  # noqa: BLE001
            self._refusal = error
            self._task.cancel()
        else:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._interval_s, self._check_again)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if kind is asyncio.CancelledError and self._refusal is not None:
            self._task.uncancel()
            raise self._refusal from None


_REMEDY: Final = f"send a role token as metadata {TOKEN_KEY}, or a client certificate with a role; see docs/security.md"
_Keys: TypeAlias = ReloadedFiles[TokenVerifier] | TokenVerifier


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Authorizer:
    """Checks callers against the access table. `from_config` makes one."""

    def __init__(
        self,
        *,
        insecure: bool = False,
        keys: _Keys | None = None,
        reads_certificates: bool = False,
        trust_domain: str = "",
        identity: ReloadedFiles[TlsIdentity] | None = None,
        audiences: Sequence[str] = (),
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        """`identity` has the authorities that sign callers' certificates. `audiences` are this receiver's names."""
        self._insecure = insecure
        self._keys = keys
        self.reads_certificates = reads_certificates and not insecure
        self._trust_domain = trust_domain
        self._identity = identity
        self._audiences = tuple(audiences)
        self._now = now

    @classmethod
    def from_config(cls, config: ServiceConfig, audiences: Sequence[str] = ()) -> Authorizer:
        """The authorizer that the settings of a service ask for. Proofs of callers are for one of `audiences`.

        Without TLS and token keys, a service on loopback accepts tokens signed with the local key. Raises ConfigError
        when a file cannot be read.
        """
        if config.insecure:
            return cls(insecure=True)
        if config.token_keys_file:
            path = config.token_keys_file
            keys: _Keys | None = ReloadedFiles([path], lambda: _read_keys(path))
        elif config.tls_certificate_file:
            keys = None
        else:
            keys = TokenVerifier.from_pem(public_key_of(load_local_key()))
        return cls(
            keys=keys,
            reads_certificates=bool(config.tls_certificate_file),
            trust_domain=config.tls_trust_domain,
            identity=tls_identity(TlsFiles.from_config(config))
            if config.tls_authority_file
            else None,
            audiences=audiences,
        )

    def serve_at(self, endpoint: str) -> None:
        """Accepts proofs for the "host:port" at which others reach this service."""
        self._audiences += (audience_of(endpoint),)

    def caller_of_metadata(
        self, method: str, metadata: Iterable[tuple[str, Any]] | None, *, again: bool = False
    ) -> Caller | None:
        """The caller that a token proves, if it may call `method`. None: the certificate decides.

        `again`: for an open call, of which the proof was checked.
        Raises Unauthenticated or PermissionDenied.
        """
        if self._insecure:
            return TRUSTED
        entries = tuple(metadata or ())
        # HTTP clients send the token of a page, in one header.
        token, _, page_proof = _value_in(entries, TOKEN_KEY).partition("~")
        if token and self._keys is not None:
            keys = self._keys
            verifier = keys.current() if isinstance(keys, ReloadedFiles) else keys
            try:
                proof = page_proof or _value_in(entries, PROOF_KEY)
                caller = verifier.verify(token, proof, self._audiences, again=again)
                return self._permitted(method, caller)
            except Unauthenticated:
                # A command may send its local token to a service of another deployment.
                if needs_role(method):
                    raise
                return ANONYMOUS
        return None if self.reads_certificates else self._permitted(method, ANONYMOUS)

    def caller_of_certificate(
        self, method: str, auth_context: Mapping[str, Iterable[bytes]]
    ) -> Caller:
        """As caller_of_metadata, for the client's certificate."""
        return self._permitted(method, caller_of_certificate(auth_context, self._trust_domain))

    def caller_of_valid_certificate(
        self, method: str, auth_context: Mapping[str, Iterable[bytes]]
    ) -> Caller:
        """As caller_of_certificate, for a call on an old connection: the certificate may have expired since.

        Raises Unauthenticated for that too, and where no authority trusts the certificate any more.
        """
        caller = self.caller_of_certificate(method, auth_context)
        if self._identity is None or not needs_role(method):
            return caller
        certificate = b"".join(auth_context.get(PEER_CERTIFICATE, ()))
        chain = b"".join(auth_context.get(PEER_CHAIN, ()))
        end = valid_until(certificate, chain, self._identity.current().authority)
        if end is None:
            raise Unauthenticated(
                "no authority of tls_authority_file signs the client's certificate any more; replace it"
            )
        if end <= self._now():
            raise Unauthenticated(
                f"the client's certificate expired at {end.isoformat()}; replace it, and its file is read again"
            )
        return caller

    def _permitted(self, method: str, caller: Caller) -> Caller:
        if not needs_role(method):
            return caller
        if not caller.roles:
            raise Unauthenticated(f"{method} needs a role; {_REMEDY}")
        allowed = roles_of(method)
        if caller.roles.isdisjoint(allowed):
            names = ", ".join(sorted(allowed)) or "none"
            raise PermissionDenied(
                f"{method} is not for the role {', '.join(sorted(caller.roles))}; roles that may call it: {names}",
                metadata={"method": method, "allowed_roles": names},
            )
        return caller


def _read_keys(path: str) -> TokenVerifier:
    """A verifier with the public keys of a file. Raises ConfigError when it has no valid keys."""
    pem = read_text("token_keys_file", path).encode()
    try:
        return TokenVerifier.from_pem(pem)
    except ConfigError as error:
        raise ConfigError(
            f"token_keys_file {path} is not valid: {error.detail}",
            metadata={"token_keys_file": path},
        ) from error


def _value_in(metadata: Iterable[tuple[str, Any]], key: str) -> str:
    for name, value in metadata:
        if name == key:
            return value if isinstance(value, str) else bytes(value).decode("latin-1")
    return ""
