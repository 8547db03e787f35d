"""Settings of the registry."""

from __future__ import annotations

from hashlib import blake2b, sha256
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr, model_validator

from headrace_common.config import (
    HostPort,
    PositiveCount,
    PositiveSeconds,
    ServiceConfig,
    require_order,
    split_host_port,
)

MEMORY_STORE = "memory"
_ETCD_SCHEME = "etcd://"
_SECRET_LEAST = 16


def _check_store(text: str) -> str:
    if text != MEMORY_STORE:
        scheme, address = text[: len(_ETCD_SCHEME)], text[len(_ETCD_SCHEME) :]
        try:
            port = split_host_port(address)[1]
        except ValueError:
            port = 0
        if scheme != _ETCD_SCHEME or port == 0:
            raise ValueError('write "memory", or an address such as etcd://127.0.0.1:2379')
    return text


def _check_prefix(text: str) -> str:
    if len(text) < 2 or not text.endswith("/") or not text.isascii() or not text.isprintable():
        raise ValueError(
            'write a prefix of printable ASCII that ends with "/", such as /headrace/v1/'
        )
    return text


def _check_secret(secret: SecretStr) -> SecretStr:
    if 0 < len(secret.get_secret_value()) < _SECRET_LEAST:
        raise ValueError(f"write at least {_SECRET_LEAST} characters, or nothing")
    return secret


class RegistryConfig(ServiceConfig):
    """Keeps who is there, where their KV memory lies, and the run-time policy."""

    listen: HostPort = Field(
        "127.0.0.1:7001", description="host:port to serve on; port 0 takes any free port."
    )
    store: Annotated[str, AfterValidator(_check_store)] = Field(
        MEMORY_STORE,
        description='Where the records live: "memory" (after a restart members register again and '
        "the policy is the default) or etcd://host:port (several registries may share one).",
    )
    store_prefix: Annotated[str, AfterValidator(_check_prefix)] = Field(
        "/headrace/v1/", description="Prefix of every etcd key; one per deployment."
    )
    store_timeout_s: PositiveSeconds = Field(
        2.0, description="Seconds that one etcd call may take before etcd counts as away."
    )
    store_start_timeout_s: PositiveSeconds = Field(
        5.0, description="Seconds that etcd may take to answer at the start."
    )
    history_size: PositiveCount = Field(
        4096, description="Changes kept for watchers that come back or lag behind."
    )
    max_members: PositiveCount = Field(10_000, description="Most members registered at once.")
    prefix_hash_key: Annotated[SecretStr, AfterValidator(_check_secret)] = Field(
        SecretStr(""),
        description="Secret that names of cached prompt prefixes are made with, the same for every registry of a "
        "deployment; empty means one kept in etcd, or with store memory the members' own.",
    )

    ticket_key: Annotated[SecretStr, AfterValidator(_check_secret)] = Field(
        SecretStr(""),
        description="Secret that routers sign tickets for decode workers with, the same for every registry of a "
        "deployment; empty means one kept in etcd, or with store memory the members' own.",
    )

    @model_validator(mode="after")
    def _check_waits(self) -> RegistryConfig:
        require_order(self, ("store_timeout_s", "store_start_timeout_s"))
        return self

    @property
    def prefix_hash_key_number(self) -> int:
        """What `prefix_hash_key` comes to; 0 when it is empty."""
        secret = self.prefix_hash_key.get_secret_value().encode()
        return int.from_bytes(blake2b(secret, digest_size=8).digest()) or 1 if secret else 0

    @property
    def ticket_key_bytes(self) -> bytes:
        """What `ticket_key` comes to; no bytes when it is empty."""
        secret = self.ticket_key.get_secret_value().encode()
        return sha256(secret).digest() if secret else b""

    @property
    def etcd_address(self) -> tuple[str, int]:
        """Host and port of the etcd that `store` names."""
        return split_host_port(self.store.removeprefix(_ETCD_SCHEME))
