"""Selects the store."""

from __future__ import annotations

from headrace_registry.config import MEMORY_STORE, RegistryConfig
from headrace_registry.store.base import Store
from headrace_registry.store.memory import MemoryStore


def open_store(config: RegistryConfig) -> Store:
    """The store that the settings name, not started. Raises ConfigError when its package is missing."""
    if config.store == MEMORY_STORE:
        return MemoryStore(config.history_size)
    # Imported here, so that a registry without etcd does not need etcd3.
    from headrace_registry.store.etcd_store import EtcdStore

    host, port = config.etcd_address
    return EtcdStore(
        host,
        port,
        prefix=config.store_prefix,
        history_size=config.history_size,
        timeout_s=config.store_timeout_s,
        start_timeout_s=config.store_start_timeout_s,
    )
