"""The process of prefill or decode workers: one, or for the sim engine as many as configured."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from pathlib import Path
from typing import Final

from headrace_common.deadlines import Deadline
from headrace_common.errors import InternalError, RegistryUnavailable
from headrace_common.identity import new_incarnation
from headrace_common.logs import setup_logging
from headrace_common.ports import split_host_port
from headrace_common.process.events import EVENTS
from headrace_common.process.kill_timer import KillTimer
from headrace_common.process.run import interruptible
from headrace_common.registry.descriptors import DescriptorCache
from headrace_common.tasks import run_together
from headrace_common.telemetry.metrics.listener import metrics_served
from headrace_engine.config import WorkerRole
from headrace_engine.factory import build_engine, shared_transport
from headrace_engine.vllm.service.engine_args import node_rank
from headrace_engine.worker.adapters import WorkerAdapters
from headrace_engine.worker.config import (
    REGISTRATION_TIMEOUT_S,
    Config,
    engine_config,
    worker_configs,
)
from headrace_engine.worker.host import HostedWorker, WorkerHost
from headrace_engine.worker.serve import BuildServer, serve_worker
from headrace_kv.layout import KvDescriptor, WorkerRef, descriptor_from_proto
from headrace_kv.send.sender import SenderThread

_LOG = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S: Final = 2.0
_POLL_S: Final = 0.2


def wait_reachable(registry: str, timeout_s: float) -> None:
    """Returns when a process listens at the registry's "host:port". Blocks, for use before anything else runs.

    A worker calls it before it loads a model, so that a wrong address costs seconds. Raises RegistryUnavailable.
    """
    host, port = split_host_port(registry)
    deadline = Deadline.after(timeout_s)
    warned = False
    while True:
        try:
            limit_s = min(_CONNECT_TIMEOUT_S, max(_POLL_S, deadline.remaining_s()))
            socket.create_connection((host.strip("[]"), port), limit_s).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if deadline.expired:
            raise RegistryUnavailable(
                f"the registry on {registry} is not reachable ({reason}), so no model was loaded: start it, or set "
                "registry to its address",
                metadata={"registry": registry},
            )
        if not warned:
            warned = True
            _LOG.warning("waiting for the registry on %s: %s", registry, reason)
        time.sleep(_POLL_S)


class RegistryDescriptors:
    """A DescriptorSource for engines, usable once it is connected.

    An engine is built before any connection is opened, because it may start processes of its own.
    """

    def __init__(self) -> None:
        self._cache: DescriptorCache | None = None

    def connect(self, cache: DescriptorCache) -> None:
        """Takes descriptors from `cache` from now on."""
        self._cache = cache

    async def __call__(self, ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        """Raises StaleIncarnation when that incarnation is gone."""
        if self._cache is None:
            raise InternalError(f"the KV memory of {ref} was needed before the worker joined")
        return descriptor_from_proto(
            await self._cache.get(ref.worker_id, ref.incarnation, deadline)
        )


async def run_workers(role: WorkerRole, config: Config, build: BuildServer[Config]) -> None:
    """Runs the workers of this process until a signal comes.

    The engines start first: they may start processes of their own, which must not inherit gRPC's
    threads. For an engine on another host, only the ranks of this one run.
    """
    setup_logging(config.log_level, role, config.worker_id, config.log_format)
    if config.engine == "vllm" and node_rank(config.engine_args):
        from headrace_engine.vllm.node import run_ranks

        ranks = engine_config(config, role=role, ref=WorkerRef(config.worker_id, ""))
        return await run_ranks(ranks, config.drain_grace_s)
    EVENTS.save_alarms(Path(config.kv_disk_folder), config.worker_id)
    with interruptible():
        wait_reachable(config.registry, REGISTRATION_TIMEOUT_S)
    if config.workers_per_process > 1:
        _raise_file_limit()
    sender_thread = transport = None
    if config.workers_per_process > 1:
        sender_thread = SenderThread("kv-sender")
        transport = shared_transport(engine_config(config, role=role, ref=WorkerRef("", "")))
    # Decode workers send too, where prefill workers fetch prefixes.
    kill_timer = KillTimer() if config.engine == "sim" else None
    descriptors = RegistryDescriptors()
    workers: list[HostedWorker[Config]] = []
    try:
        for own in worker_configs(config):
            start_unix_ns = time.time_ns()
            ref = WorkerRef(own.worker_id, new_incarnation())
            engine = build_engine(
                engine_config(own, role=role, ref=ref),
                descriptors,
                sender_thread,
                kill_timer,
                transport,
            )
            adapters = WorkerAdapters(ref, engine, own.adapter_folders)
            workers.append(HostedWorker(own, ref, engine, start_unix_ns, adapters))
            await engine.start()
        host = WorkerHost(role, config)
        descriptors.connect(host.descriptors)
        try:
            async with metrics_served(config, host.telemetry.metrics):
                await run_together([serve_worker(host, worker, build) for worker in workers])
        finally:
            await host.close()
    finally:
        await asyncio.gather(*(worker.engine.close() for worker in workers))


def _raise_file_limit() -> None:
    """Each worker needs a socket to listen on, and one for each caller."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
