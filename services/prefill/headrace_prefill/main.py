"""The prefill worker's process, from settings to the last task."""

from __future__ import annotations

from functools import partial

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2_grpc
from headrace_common.config import load_config
from headrace_common.deadlines import Deadline
from headrace_common.errors import InternalError
from headrace_common.logs import setup_logging
from headrace_common.process.run import run_service
from headrace_common.registry.descriptors import DescriptorCache
from headrace_common.rpc.server import GrpcServer
from headrace_engine.worker.config import served_model, worker_member
from headrace_engine.worker.host import HostedWorker, WorkerHost, host_workers
from headrace_engine.worker.membership import WorkerMembership
from headrace_engine.worker.status import WorkerStatusServicer
from headrace_kv.layout.layout import KvDescriptor, WorkerRef
from headrace_kv.layout.proto import descriptor_from_proto, layout_to_proto
from headrace_prefill.config import PrefillConfig
from headrace_prefill.puller import TaskPuller
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
    """Runs the workers of this process until a signal comes."""
    setup_logging(config.log_level, "prefill", config.worker_id)
    descriptors = LateDescriptors()

    async def serve_connected(host: WorkerHost, hosted: HostedWorker[PrefillConfig]) -> None:
        descriptors.connect(host.descriptors)
        await serve_worker(host, hosted)

    await host_workers("prefill", config, descriptors, serve_connected)


async def serve_worker(host: WorkerHost, hosted: HostedWorker[PrefillConfig]) -> None:
    """Serves one worker for as long as `host` says."""
    config, ref, engine = hosted.config, hosted.ref, hosted.engine
    worker = PrefillWorker(
        ref=ref,
        engine=engine,
        telemetry=host.telemetry.for_worker(ref.worker_id),
        slot_count=config.max_num_seqs,
        task_timeout_s=config.task_timeout_s,
        on_ended=partial(host.metrics.transfer_ended, ref.worker_id),
    )
    puller = TaskPuller(
        config,
        worker,
        model=served_model(config, engine),
        layout=layout_to_proto(engine.descriptor.layout),
    )
    server = GrpcServer(config, SERVICES)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(
        WorkerStatusServicer(
            worker.status, engine.prefix_events, engine.reset_prefix_cache, server.request_drain
        ),
        server.server,
    )
    endpoint = await server.start()
    server.set_serving(False)
    member = worker_member(
        config,
        role=registry_pb2.Member.ROLE_PREFILL,
        ref=ref,
        endpoint=endpoint,
        engine=engine,
        start_unix_ns=hosted.start_unix_ns,
    )
    membership = WorkerMembership(
        config, host, member, None, puller.set_routers, engine.prefix_events
    )

    async def drain(deadline: Deadline) -> None:
        await membership.leave()
        await puller.drain(deadline)
        await puller.close()

    try:
        await membership.join()
        server.set_serving(True)
        with host.metrics.following(ref.worker_id, worker.status, blocks=False):
            await host.serve(endpoint, server, drain)
    finally:
        await membership.leave()
        await puller.close()
