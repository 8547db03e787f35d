"""The prefill worker's process, from settings to the last task."""

from __future__ import annotations

import asyncio
import time

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2_grpc
from headrace_common.config import load_config
from headrace_common.deadlines import Deadline
from headrace_common.errors import InternalError
from headrace_common.identity import new_incarnation
from headrace_common.logs import setup_logging
from headrace_common.registry_client import DescriptorCache
from headrace_common.run import run_service
from headrace_common.server import GrpcServer
from headrace_common.telemetry import init_telemetry
from headrace_engine.factory import build_engine
from headrace_engine.interface import Engine
from headrace_engine.worker_config import engine_config, served_model, worker_member
from headrace_engine.worker_membership import WorkerMembership
from headrace_engine.worker_status import WorkerStatusServicer
from headrace_kv.layout import KvDescriptor, WorkerRef, descriptor_from_proto, layout_to_proto
from headrace_prefill.config import PrefillConfig
from headrace_prefill.puller import Puller
from headrace_prefill.worker import PrefillWorker

PROG = "headrace-prefill"
SERVICES = ("headrace.worker.v1.WorkerService",)


class LateDescriptors:
    """Finds decode workers' memory in the registry, once there is a connection to it.

    An engine is built before any connection is opened, because it may start processes of its own.
    """

    def __init__(self) -> None:
        self._cache: DescriptorCache | None = None

    def connect(self, cache: DescriptorCache) -> None:
        """From now on, descriptors come from `cache`."""
        self._cache = cache

    async def __call__(self, ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        """Raises StaleIncarnation when that incarnation is gone."""
        if self._cache is None:
            raise InternalError(
                f"the KV memory of {ref} was asked for before the worker had joined"
            )
        return descriptor_from_proto(
            await self._cache.get(ref.worker_id, ref.incarnation, deadline)
        )


def main() -> None:
    """Runs until SIGTERM."""
    run_service(
        PROG,
        lambda: serve(load_config(PrefillConfig, None, prog=PROG, env_prefix="HEADRACE_PREFILL_")),
    )


async def serve(config: PrefillConfig) -> None:
    """Starts the engine, then everything that talks, and serves until a signal comes."""
    setup_logging(config.log_level, "prefill", config.worker_id)
    start_unix_ns = time.time_ns()
    ref = WorkerRef(config.worker_id, new_incarnation())
    descriptors = LateDescriptors()
    engine = build_engine(engine_config(config, role="prefill", ref=ref), descriptors)
    try:
        await engine.start()
        await _serve(config, ref, engine, descriptors, start_unix_ns)
    finally:
        await engine.close()


async def _serve(
    config: PrefillConfig,
    ref: WorkerRef,
    engine: Engine,
    descriptors: LateDescriptors,
    start_unix_ns: int,
) -> None:
    telemetry = init_telemetry("prefill", config.worker_id, config)
    worker = PrefillWorker(
        ref=ref,
        engine=engine,
        telemetry=telemetry,
        slot_count=config.max_requests,
        task_timeout_s=config.task_timeout_s,
    )
    puller = Puller(
        config,
        worker,
        model=served_model(config, engine),
        layout=layout_to_proto(engine.descriptor.layout),
    )
    server = GrpcServer(config, SERVICES)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(
        WorkerStatusServicer(worker.status), server.server
    )
    endpoint = await server.start()
    server.set_serving(False)
    member = worker_member(
        config,
        role=registry_pb2.Member.ROLE_PREFILL,
        ref=ref,
        endpoint=endpoint,
        engine=engine,
        start_unix_ns=start_unix_ns,
    )
    membership = WorkerMembership(config, member, None, telemetry, puller.set_routers)
    descriptors.connect(membership.descriptors)

    async def drain() -> None:
        await membership.leave()
        await puller.drain()
        await puller.close()

    try:
        await membership.join()
        server.set_serving(True)
        await server.serve_until_signal(drain)
    finally:
        await puller.close()
        await membership.close()
        await asyncio.to_thread(telemetry.shutdown)
