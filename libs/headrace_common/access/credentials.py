"""What a process presents to the services that it calls, and the settings that name it."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TypeAlias

from headrace_common.access.roles import PROOF_KEY, STATUS_AUDIENCE, TOKEN_KEY, Role
from headrace_common.errors import ConfigError
from headrace_common.ports import is_loopback
from headrace_common.reloading import ReloadedFiles, read_text

if TYPE_CHECKING:
    from headrace_common.access.tokens import HeldToken
    from headrace_common.config import ServiceConfig


_LOCAL_LIFETIME_S: Final = 86_400.0
Metadata: TypeAlias = tuple[tuple[str, str], ...]


def audience_of(endpoint: str) -> str:
    """The name of the receiver at "host:port". All names of this host's loopback are one."""
    if not is_loopback(endpoint):
        return endpoint.lower()
    return f"localhost:{endpoint.rpartition(':')[2]}"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of TLS, for code without a ServiceConfig. All empty means plaintext.

    A caller without a certificate names the authority only. A server without one asks callers for no certificate.
    """

    tls_certificate_file: str = ""
    tls_key_file: str = ""
    tls_authority_file: str = ""

    @property
    def encrypts(self) -> bool:
        """Whether a caller with these files uses TLS."""
        return bool(self.tls_authority_file)

    @classmethod
    def from_config(cls, config: ServiceConfig) -> TlsFiles:
        """The files that the settings of a service name."""
        return cls(config.tls_certificate_file, config.tls_key_file, config.tls_authority_file)

    @classmethod
    def from_environment(cls) -> TlsFiles:
        """The files that HEADRACE_TLS_CERTIFICATE_FILE, _KEY_FILE and _AUTHORITY_FILE name.

        For programs that call services. The authority alone is enough for servers that ask for no certificate. Raises
        ConfigError when others are missing.
        """
        names = {field.name: f"HEADRACE_{field.name.upper()}" for field in fields(cls)}
        files = {field: os.environ.get(name, "") for field, name in names.items()}
        missing = [names[field] for field, path in files.items() if not path]
        given = {field for field, path in files.items() if path}
        if missing and given - {"tls_authority_file"}:
            raise ConfigError(
                f"{' and '.join(missing)} not set: name all three files of mutual TLS, the authority alone, or none"
            )
        return cls(**files)


@dataclass(frozen=True, slots=True)
class Credentials:
    """TLS files and a token, both optional.

    The token is that of `token_file`. Without one, calls to loopback addresses in plaintext carry a token that is
    signed with the local key for `role`. Without a role they carry none.
    """

    tls: TlsFiles = TlsFiles()
    token_file: str = ""
    role: Role | None = None

    @classmethod
    def from_config(cls, config: ServiceConfig) -> Credentials:
        """The credentials that the settings of a service name."""
        role = Role(config.role) if config.role and not config.insecure else None
        return cls(TlsFiles.from_config(config), config.token_file, role)

    @classmethod
    def from_environment(cls, role: Role | None) -> Credentials:
        """As TlsFiles.from_environment, with the token that HEADRACE_TOKEN_FILE names."""
        return cls(TlsFiles.from_environment(), os.environ.get("HEADRACE_TOKEN_FILE", ""), role)

    def metadata_for(self, endpoint: str, receiver: str = "") -> Metadata:
        """What calls to an endpoint send: a token, and a proof for this receiver only. Empty when there is none.

        `receiver` is REGISTRY_AUDIENCE where the caller's own settings name the registry: its endpoint may be an alias.
        Raises ConfigError when the file, or the local key, cannot be read.
        """
        held = self._held_for(endpoint)
        if held is None:
            return ()
        # Deployments with one local key differ by their ports.
        proof = held.proof(receiver if receiver and self.token_file else audience_of(endpoint))
        return (
            ((TOKEN_KEY, held.token), (PROOF_KEY, proof)) if proof else ((TOKEN_KEY, held.token),)
        )

    def page_token(self, endpoint: str) -> str:
        """A token and a proof for status pages, separated by "~". Empty when there is none. Raises as metadata_for."""
        held = self._held_for(endpoint)
        if held is None:
            return ""
        return "~".join(
            filter(None, (held.token, held.proof(STATUS_AUDIENCE, secrets.token_hex(8))))
        )

    def _held_for(self, endpoint: str) -> HeldToken | None:
        if self.token_file:
            return _token_of(self.token_file).current()
        if self.role is None or self.tls.encrypts or not is_loopback(endpoint):
            return None
        return _local_token(self.role, int(time.time() / (_LOCAL_LIFETIME_S / 2)))


@lru_cache(maxsize=8)
def _token_of(path: str) -> ReloadedFiles[HeldToken]:
    return ReloadedFiles([path], lambda: _read_token(path))


def _read_token(path: str) -> HeldToken:
    from headrace_common.access.tokens import HeldToken

    try:
        held = HeldToken.from_text(read_text("token_file", path))
        if held.token and held.token.isascii():
            return held
        problem = "it is empty, or not in ASCII"
    except ConfigError as error:
        problem = error.detail
    raise ConfigError(
        f"token_file {path} has no token: {problem}; name a file that `headrace token create` wrote",
        metadata={"token_file": path},
    )


@lru_cache(maxsize=8)
def _local_token(role: Role, period: int) -> HeldToken:
    """A token of this process. Each period of half a lifetime has a new one."""
    # Programs that call public RPCs only do without these modules.
    from headrace_common.access.tokens import HeldToken, load_local_key

    return HeldToken.create(load_local_key(), role, "", _LOCAL_LIFETIME_S)
