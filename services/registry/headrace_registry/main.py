"""Starts the registry: settings, store, server."""

from __future__ import annotations

import logging
from typing import NoReturn

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_common.config import load_config, redacted
from headrace_common.deadlines import Deadline
from headrace_common.logs import setup_logging
from headrace_common.process.run import run_service
from headrace_common.rpc.server import GrpcServer
from headrace_registry.config import MEMORY_STORE, RegistryConfig
from headrace_registry.service import RegistryServicer
from headrace_registry.store.base import Store
from headrace_registry.store.memory import MemoryStore

_log = logging.getLogger(__name__)

PROG = "headrace-registry"
SERVICE = registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name


def main() -> NoReturn:
    """Entry point of the console script."""
    run_service(PROG, serve)


async def serve() -> None:
    """Serves until a signal ends it. Raises ConfigError when it cannot start as configured."""
    config = load_config(RegistryConfig, None, prog=PROG, env_prefix="HEADRACE_REGISTRY_")
    setup_logging(config.log_level, PROG, "")
    store = open_store(config)
    await store.start()
    try:
        server = GrpcServer(config, [SERVICE])
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(
            RegistryServicer(
                store,
                config.max_members,
                config.prefix_hash_key_number,
                config.ticket_key_bytes,
            ),
            server.server,
        )
        endpoint = await server.start()
        _log.info("serving on %s with %s", endpoint, redacted(config))
        await server.serve_until_signal(_drain)
    finally:
        await store.close()


def open_store(config: RegistryConfig) -> Store:
    """The store that the settings name, not yet started."""
    if config.store == MEMORY_STORE:
        return MemoryStore(config.history_size)
    # Only here, so that a registry without etcd needs no etcd3.
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


async def _drain(deadline: Deadline) -> None:
    """Nothing outlives its RPC here: the server ends the watches by itself."""
