"""Starts the registry: settings, store, server."""

from __future__ import annotations

import logging
from typing import NoReturn

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.logs import setup_logging
from headrace_common.process.run import run_service
from headrace_common.process.settings import load_config, redacted
from headrace_common.rpc.server import GrpcServer
from headrace_registry.config import RegistryConfig
from headrace_registry.metrics import recorded_metrics
from headrace_registry.service import RegistryServicer
from headrace_registry.store.factory import open_store

_log = logging.getLogger(__name__)

PROG = "headrace-registry"
SERVICE = registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name


def main() -> NoReturn:
    """Entry point of the console script."""
    run_service(PROG, serve)


async def serve() -> None:
    """Serves until a signal. Raises ConfigError when it cannot start as configured."""
    config = load_config(RegistryConfig, None, prog=PROG, env_prefix="HEADRACE_REGISTRY_")
    setup_logging(config.log_level, PROG, "", config.log_format)
    prefix_hash_key = config.read_prefix_hash_key()
    store = open_store(config)
    await store.start()
    try:
        async with recorded_metrics(store, config):
            server = GrpcServer(config, [SERVICE])
            registry_pb2_grpc.add_RegistryServiceServicer_to_server(
                RegistryServicer(
                    *(store, config.max_members, config.max_unnamed_members, prefix_hash_key),
                    max_routers=config.max_routers,
                    registrations_per_s=config.max_registrations_per_s,
                ),
                server.server,
            )
            endpoint = await server.start()
            _log.info("serving on %s with %s", endpoint, redacted(config))
            await server.serve_until_signal(_drain)
    finally:
        await store.close()


async def _drain(deadline: Deadline) -> None:
    """Does nothing: no work outlives its RPC, and the server ends the watches."""
