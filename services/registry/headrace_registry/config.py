"""Settings of the registry."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated

from pydantic import Field, SecretStr, model_validator

from headrace_common import ports
from headrace_common.access.roles import REGISTRY_AUDIENCE, Role
from headrace_common.config import (
    HostPort,
    PositiveCount,
    PositiveSeconds,
    ServiceConfig,
    checked,
    checked_by,
    require_order,
)
from headrace_common.errors import ConfigError
from headrace_common.ports import split_host_port
from headrace_common.reloading import read_text

MEMORY_STORE = "memory"
_ETCD_SCHEME = "etcd://"
_SECRET_CHARACTERS_MIN = 16


def _check_store(text: str) -> None:
    if text != MEMORY_STORE:
        try:
            endpoints = _etcd_endpoints(text)
        except ValueError:
            endpoints = ()
        if not endpoints or any(port == 0 for _, port in endpoints):
            raise ValueError(
                'write "memory", or addresses such as etcd://127.0.0.1:2379 or etcd://host1:2379,host2:2379'
            )
        if len(set(endpoints)) < len(endpoints):
            raise ValueError("name each endpoint once")


def _etcd_endpoints(text: str) -> tuple[tuple[str, int], ...]:
    if not text.startswith(_ETCD_SCHEME):
        return ()
    addresses = text.removeprefix(_ETCD_SCHEME).split(",")
    return tuple(split_host_port(address) for address in addresses)


def _check_prefix(text: str) -> None:
    if len(text) < 2 or not text.endswith("/") or not text.isascii() or not text.isprintable():
        raise ValueError(
            'write a prefix of printable ASCII that ends with "/", such as /headrace/v1/'
        )


def _check_secret(secret: SecretStr) -> None:
    if 0 < len(secret.get_secret_value()) < _SECRET_CHARACTERS_MIN:
        raise ValueError(f"write at least {_SECRET_CHARACTERS_MIN} characters, or nothing")


class RegistryConfig(ServiceConfig):
    """The registry: stores the members, their KV descriptors and the run-time policy."""

    role = Role.REGISTRY
    audiences = (REGISTRY_AUDIENCE,)

    internal_listen: HostPort = Field(
        f"127.0.0.1:{ports.REGISTRY}",
        description="host:port to serve the other services and operators on; port 0 takes any free port.",
    )
    store: Annotated[str, checked_by(_check_store)] = Field(
        MEMORY_STORE,
        description='Where the records are stored: "memory" or etcd://HOST:PORT,HOST:PORT with the '
        "endpoints of one etcd, which are used in this order. After a restart of a registry with memory, members "
        "register again and the policy is the default. Several registries may share one etcd.",
    )
    store_tls_authority_file: str = Field(
        "",
        description="PEM certificates of the authorities that sign etcd's certificates; empty means plaintext.",
    )
    store_tls_certificate_file: str = Field(
        "", description="PEM certificate for etcd, where it asks for one; empty means none."
    )
    store_tls_key_file: str = Field(
        "", description="PEM private key of store_tls_certificate_file."
    )
    store_user: str = Field("", description="User of etcd; empty means no authentication.")
    store_password_file: str = Field(
        "",
        description="File with the password of store_user. It is read for each authentication, so a changed password "
        "needs no restart.",
    )
    store_prefix: Annotated[str, checked_by(_check_prefix)] = Field(
        "/headrace/v1/", description="Prefix of every etcd key, different for each deployment."
    )
    store_timeout_s: PositiveSeconds = Field(
        2.0, description="Seconds that one etcd call may take before etcd counts as unavailable."
    )
    store_start_timeout_s: PositiveSeconds = Field(
        5.0, description="Seconds that etcd may take to respond at the start."
    )
    history_size: PositiveCount = Field(
        4096, description="Changes kept for watchers that reconnect or fall behind."
    )
    max_members: PositiveCount = Field(
        10_000, description="Maximum number of members registered at once."
    )
    max_unnamed_members: PositiveCount = Field(
        1_024,
        description="Members of one role, up to which a credential without a name may register another one. A "
        "credential with a name registers the member of that name also beyond that.",
    )
    max_routers: PositiveCount = Field(
        64,
        description="Routers registered at once. Every worker connects to each of them.",
    )
    max_registrations_per_s: PositiveSeconds = Field(
        1.0,
        description="Registrations of one member each second, and 20 times as many at once.",
    )
    prefix_hash_key: Annotated[SecretStr, checked_by(_check_secret)] = Field(
        SecretStr(""),
        description="Secret from which hashes of cached prompt prefixes are keyed, the same for every registry of a "
        "deployment. Empty means a random key: stored in etcd, or with store memory by the members.",
    )
    prefix_hash_key_file: str = Field(
        "", description="File of prefix_hash_key, which it replaces. It is read at the start."
    )

    @model_validator(mode="after")
    def _check_waits(self) -> RegistryConfig:
        require_order(self, ("store_timeout_s", "store_start_timeout_s"))
        return self

    @model_validator(mode="after")
    def _check_etcd(self) -> RegistryConfig:
        authority = self.store_tls_authority_file
        certificate, key = self.store_tls_certificate_file, self.store_tls_key_file
        user, password = self.store_user, self.store_password_file
        problems: list[str] = []
        if self.store == MEMORY_STORE and any((authority, certificate, key, user, password)):
            problems.append("settings of etcd need store: set it to etcd://HOST:PORT")
        if bool(certificate) != bool(key) or (certificate and not authority):
            problems.append(
                "set store_tls_certificate_file and store_tls_key_file together, beside store_tls_authority_file"
            )
        if bool(user) != bool(password):
            problems.append("set store_user and store_password_file together")
        elif (
            user
            and not authority
            and not all(ports.is_loopback(one) for one, _ in self.etcd_endpoints)
        ):
            problems.append(
                "store_user needs store_tls_authority_file: else its password would cross the network in clear"
            )
        return checked(self, problems)

    @model_validator(mode="after")
    def _check_secrets(self) -> RegistryConfig:
        if self.prefix_hash_key.get_secret_value() and self.prefix_hash_key_file:
            raise ValueError("set prefix_hash_key or prefix_hash_key_file, not both")
        return self

    def read_prefix_hash_key(self) -> int:
        """The key of 64 bits derived from `prefix_hash_key`; 0 when there is none. Raises ConfigError."""
        secret = self._read_secret("prefix_hash_key").encode()
        return int.from_bytes(blake2b(secret, digest_size=8).digest()) or 1 if secret else 0

    def _read_secret(self, name: str) -> str:
        """The value of a setting, or the content of its file."""
        given: SecretStr = getattr(self, name)
        path: str = getattr(self, f"{name}_file")
        if not path:
            return given.get_secret_value()
        secret = read_text(f"{name}_file", path).strip()
        if len(secret) < _SECRET_CHARACTERS_MIN:
            problem = f"is too short: write at least {_SECRET_CHARACTERS_MIN} characters"
            raise ConfigError(f"{name}_file {path} {problem}", metadata={f"{name}_file": path})
        return secret

    @property
    def etcd_endpoints(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each endpoint that `store` names. None for the store in memory."""
        return _etcd_endpoints(self.store)
