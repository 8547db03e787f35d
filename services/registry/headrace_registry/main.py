"""Starts the registry: settings, store, server."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_common.access.credentials import TlsFiles
from headrace_common.config import ServiceConfig
from headrace_common.deadlines import Deadline
from headrace_common.logs import setup_logging
from headrace_common.process.run import run_service
from headrace_common.process.settings import load_config, redacted
from headrace_common.rpc.server import GrpcServer
from headrace_common.tasks import end_task
from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics.listener import metrics_served
from headrace_common.telemetry.metrics.process import Metrics
from headrace_common.telemetry.setup import init_telemetry
from headrace_registry.config import MEMORY_STORE, RegistryConfig
from headrace_registry.service import RegistryServicer, Store
from headrace_registry.store.base import MemoryStore


@asynccontextmanager
async def recorded_metrics(store: Store, config: ServiceConfig) -> AsyncIterator[Metrics]:
    """Samples, exports and serves the metrics of a registry over the block, where the settings ask for it.

    Raises ConfigError when it cannot listen.
    """
    telemetry = init_telemetry("registry", config.internal_listen, config)
    metrics = telemetry.metrics
    corrupt = metrics.store.gauge(schema.METRIC_CORRUPT_RECORDS)
    members = metrics.store.gauge(schema.METRIC_MEMBERS)

    def sample() -> None:
        corrupt.set(store.corrupt_record_count)
        members.replace(Counter(map(_role_name, store.feed.members.values())))

    task = metrics.start_sampling(sample)
    try:
        async with metrics_served(config, metrics):
            yield metrics
    finally:
        await end_task(task)
        await asyncio.to_thread(telemetry.shutdown)


def _role_name(member: registry_pb2.Member) -> str:
    return registry_pb2.Member.Role.Name(member.role).removeprefix("ROLE_").lower()


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
            tls=TlsFiles(
                config.store_tls_certificate_file,
                config.store_tls_key_file,
                config.store_tls_authority_file,
            ),
            user=config.store_user,
            password_file=config.store_password_file,
        ),
        prefix=config.store_prefix,
        history_size=config.history_size,
        start_timeout_s=config.store_start_timeout_s,
    )


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
                    store=store,
                    max_members=config.max_members,
                    max_unnamed_members=config.max_unnamed_members,
                    prefix_hash_key=prefix_hash_key,
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
