"""The credentials of a chaos run: certificates or tokens with a role and a name, or the local key."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import grpc.aio

from headrace_common.access.credentials import Credentials, TlsFiles
from headrace_common.access.roles import Role
from headrace_common.access.tokens import HeldToken, new_private_key, public_key_of
from headrace_common.rpc.channel import open_channel

_LIFETIME_S = 86_400.0


class CredentialKind(StrEnum):
    """What proves a role."""

    TLS = "tls"
    TOKENS = "tokens"
    LOCAL = "local"


class Identities:
    """One credential for each process, which a restarted process presents again. Clients have no role.

    `operator` is for the checks of the run.
    """

    def __init__(self, kind: CredentialKind, folder: Path) -> None:
        self._kind = kind
        self._folder = folder
        self._private_key = b""
        self.operator = Credentials(role=Role.OPERATOR)
        self._client = TlsFiles()
        if kind is CredentialKind.TLS:
            # The virtual machines of tests/rdma have the local key only.
            from tests.suite.certificates import Authority

            self._authority = Authority(folder)
            self.operator = Credentials(self._authority.sign("operator", Role.OPERATOR))
            self._client = self._authority.sign("client")
        elif kind is CredentialKind.TOKENS:
            folder.mkdir()
            self._private_key = new_private_key()
            (folder / "token_keys.pem").write_bytes(public_key_of(self._private_key))
            self.operator = Credentials(token_file=self._token_file(Role.OPERATOR, ""))

    def flags(self, service: str, name: str) -> tuple[str, ...]:
        """The flags by which a process presents a credential for its role and name, and checks those of others."""
        if self._kind is CredentialKind.TLS:
            files = self._authority.sign(name, f"{service}/{name}")
            return (
                f"--tls-certificate-file={files.tls_certificate_file}",
                f"--tls-key-file={files.tls_key_file}",
                f"--tls-authority-file={files.tls_authority_file}",
            )
        if self._kind is CredentialKind.TOKENS:
            return (
                f"--token-file={self._token_file(Role(service), name)}",
                f"--token-keys-file={self._folder / 'token_keys.pem'}",
            )
        return ()

    def client_channel(self, endpoint: str) -> grpc.aio.Channel:
        """A channel as the client library opens it."""
        return open_channel(endpoint, self._client)

    def _token_file(self, role: Role, name: str) -> str:
        path = self._folder / f"{name or role}.token"
        path.write_text(HeldToken.create(self._private_key, role, name, _LIFETIME_S).text)
        return str(path)
