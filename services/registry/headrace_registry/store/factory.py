"""Selects the store."""

from __future__ import annotations

from headrace_registry.config import MEMORY_STORE, RegistryConfig
from headrace_registry.store.base import Store
from headrace_registry.store.memory import MemoryStore


def open_store(config: RegistryConfig) -> Store:
    """The store that the settings name, not started. Raises ConfigError when its package or a file is missing."""
    if config.store == MEMORY_STORE:
        return MemoryStore(config.history_size)
    # Imported here, so that a registry without etcd does not need etcd3.
    from headrace_registry.store.etcd_endpoint import EtcdAccess
    from headrace_registry.store.etcd_store import EtcdStore

    return EtcdStore(
        EtcdAccess(
            endpoints=config.etcd_endpoints,
            timeout_s=config.store_timeout_s,
            authority_file=config.store_tls_authority_file,
            certificate_file=config.store_tls_certificate_file,
            key_file=config.store_tls_key_file,
            user=config.store_user,
            password_file=config.store_password_file,
        ),
        prefix=config.store_prefix,
        history_size=config.history_size,
        start_timeout_s=config.store_start_timeout_s,
    )
