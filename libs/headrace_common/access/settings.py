"""The settings that access control reads. ServiceConfig has them."""

from __future__ import annotations

from typing import Protocol

from headrace_common.access.roles import Role


class AccessSettings(Protocol):
    """See headrace_common.config.ServiceConfig for the meaning of each."""

    @property
    def role(self) -> Role | None: ...
    @property
    def tls_certificate_file(self) -> str: ...
    @property
    def tls_key_file(self) -> str: ...
    @property
    def tls_authority_file(self) -> str: ...
    @property
    def tls_trust_domain(self) -> str: ...
    @property
    def token_file(self) -> str: ...
    @property
    def token_keys_file(self) -> str: ...
    @property
    def insecure(self) -> bool: ...
