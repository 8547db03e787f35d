"""Decides for an internal listener which caller an RPC has, and whether that caller may make it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

from headrace_common.access.certificates import (
    PEER_CERTIFICATE,
    PEER_CHAIN,
    caller_of_certificate,
    valid_until,
)
from headrace_common.access.credentials import TlsFiles
from headrace_common.access.local_key import load_local_key
from headrace_common.access.roles import ANONYMOUS, TOKEN_KEY, TRUSTED, Caller
from headrace_common.access.settings import AccessSettings
from headrace_common.access.table import needs_role, roles_of
from headrace_common.access.tls import TlsIdentity, tls_identity
from headrace_common.access.tokens import TokenVerifier, public_key_of
from headrace_common.errors import ConfigError, PermissionDenied, Unauthenticated
from headrace_common.reloading import ReloadedFiles

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
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        """`identity` has the authorities that sign callers' certificates."""
        self._insecure = insecure
        self._keys = keys
        self.reads_certificates = reads_certificates and not insecure
        self._trust_domain = trust_domain
        self._identity = identity
        self._now = now

    @classmethod
    def from_config(cls, config: AccessSettings) -> Authorizer:
        """The authorizer that the settings of a service ask for.

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
            keys = _local_verifier()
        files = TlsFiles(
            config.tls_certificate_file, config.tls_key_file, config.tls_authority_file
        )
        return cls(
            keys=keys,
            reads_certificates=bool(config.tls_certificate_file),
            trust_domain=config.tls_trust_domain,
            identity=tls_identity(files) if config.tls_authority_file else None,
        )

    def caller_of_metadata(
        self, method: str, metadata: Iterable[tuple[str, Any]] | None
    ) -> Caller | None:
        """The caller that a token proves, if it may call `method`. None: the certificate decides.

        Raises Unauthenticated or PermissionDenied.
        """
        if self._insecure:
            return TRUSTED
        token = _token_in(metadata or ())
        if token and self._keys is not None:
            keys = self._keys
            verifier = keys.current() if isinstance(keys, ReloadedFiles) else keys
            try:
                return self._permitted(method, verifier.verify(token))
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
    try:
        return TokenVerifier.from_pem(Path(path).read_bytes())
    except OSError as error:
        problem = f"cannot be read: {error.strerror}; name a file of public keys"
    except ConfigError as error:
        problem = f"is not valid: {error.detail}"
    raise ConfigError(f"token_keys_file {path} {problem}", metadata={"token_keys_file": path})


def _local_verifier() -> TokenVerifier:
    return TokenVerifier.from_pem(public_key_of(load_local_key()))


def _token_in(metadata: Iterable[tuple[str, Any]]) -> str:
    for name, value in metadata:
        if name == TOKEN_KEY:
            return value if isinstance(value, str) else bytes(value).decode("latin-1")
    return ""
