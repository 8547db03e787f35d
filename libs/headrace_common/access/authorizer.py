"""Decides for one server which caller an RPC has, and whether that caller may make it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from headrace_common.access.certificates import caller_of_certificate
from headrace_common.access.local_key import load_local_key
from headrace_common.access.roles import ANONYMOUS, TOKEN_KEY, TRUSTED, Caller
from headrace_common.access.settings import AccessSettings
from headrace_common.access.table import PUBLIC, roles_of
from headrace_common.access.tokens import TokenVerifier, public_key_of
from headrace_common.errors import ConfigError, PermissionDenied, Unauthenticated

_LOG = logging.getLogger(__name__)

_FILE_CHECK_INTERVAL_S: Final = 1.0
_REMEDY: Final = f"send a role token as metadata {TOKEN_KEY}, or a client certificate with a role; see docs/security.md"


class Authorizer:
    """Checks callers against the access table. `from_config` makes one."""

    def __init__(
        self,
        *,
        insecure: bool = False,
        keys: KeyFile | TokenVerifier | None = None,
        reads_certificates: bool = False,
        trust_domain: str = "",
    ) -> None:
        self._insecure = insecure
        self._keys = keys
        self.reads_certificates = reads_certificates and not insecure
        self._trust_domain = trust_domain

    @classmethod
    def from_config(cls, config: AccessSettings) -> Authorizer:
        """The authorizer that the settings of a service ask for.

        Without TLS and token keys, a service on loopback accepts tokens signed with the local key. Raises ConfigError
        when a file cannot be read.
        """
        if config.insecure:
            return cls(insecure=True)
        if config.token_keys_file:
            keys: KeyFile | TokenVerifier | None = KeyFile(config.token_keys_file)
        elif config.tls_certificate_file:
            keys = None
        else:
            keys = _local_verifier()
        return cls(
            keys=keys,
            reads_certificates=bool(config.tls_certificate_file),
            trust_domain=config.tls_trust_domain,
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
            verifier = self._keys.current() if isinstance(self._keys, KeyFile) else self._keys
            return self._permitted(method, verifier.verify(token))
        return None if self.reads_certificates else self._permitted(method, ANONYMOUS)

    def caller_of_certificate(
        self, method: str, auth_context: Mapping[str, Iterable[bytes]]
    ) -> Caller:
        """As caller_of_metadata, for the client's certificate."""
        return self._permitted(method, caller_of_certificate(auth_context, self._trust_domain))

    def _permitted(self, method: str, caller: Caller) -> Caller:
        if method in PUBLIC:
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


class KeyFile:
    """The public keys of a file, read again when it changes. An invalid new file leaves the old keys in force."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError when the file has no valid keys."""
        self._path = Path(path)
        self._stamp = self._stamp_of_file()
        self._verifier = self._read()
        self._checked_s = time.monotonic()

    def current(self) -> TokenVerifier:
        """A verifier with the keys in force."""
        now_s = time.monotonic()
        if now_s - self._checked_s >= _FILE_CHECK_INTERVAL_S:
            self._checked_s = now_s
            self._reload()
        return self._verifier

    def _reload(self) -> None:
        try:
            stamp = self._stamp_of_file()
            if stamp != self._stamp:
                self._stamp = stamp
                self._verifier = self._read()
                _LOG.info("token_keys_file %s was read again", self._path)
        except ConfigError as error:
            _LOG.error("the old token keys stay in force: %s", error)

    def _stamp_of_file(self) -> tuple[int, int]:
        try:
            status = self._path.stat()
        except OSError as error:
            raise self._unreadable(error) from error
        return status.st_mtime_ns, status.st_ino

    def _read(self) -> TokenVerifier:
        try:
            return TokenVerifier.from_pem(self._path.read_bytes())
        except OSError as error:
            raise self._unreadable(error) from error
        except ConfigError as error:
            raise ConfigError(
                f"token_keys_file {self._path}: {error.detail}",
                metadata={"token_keys_file": str(self._path)},
            ) from error

    def _unreadable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"token_keys_file {self._path} cannot be read: {error.strerror}; name a file of public keys",
            metadata={"token_keys_file": str(self._path)},
        )


def _local_verifier() -> TokenVerifier:
    return TokenVerifier.from_pem(public_key_of(load_local_key()))


def _token_in(metadata: Iterable[tuple[str, Any]]) -> str:
    for name, value in metadata:
        if name == TOKEN_KEY:
            return value if isinstance(value, str) else bytes(value).decode("latin-1")
    return ""
