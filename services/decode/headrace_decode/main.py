"""The decode worker's process, from settings to the last request."""

from __future__ import annotations

import asyncio

from headrace.decode.v1 import decode_pb2_grpc
from headrace.kv.v1 import handoff_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2_grpc
from headrace_common.config import load_config
from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError, InternalError
from headrace_common.logs import setup_logging
from headrace_common.process.run import run_service
from headrace_common.rpc.server import GrpcServer
from headrace_decode.admission import Admission, Capacity
from headrace_decode.config import DecodeConfig
from headrace_decode.service import DecodeService
from headrace_engine.interface import Engine
from headrace_engine.worker.config import worker_member
from headrace_engine.worker.host import HostedWorker, WorkerHost, host_workers
from headrace_engine.worker.membership import WorkerMembership
from headrace_engine.worker.status import WorkerStatusServicer
from headrace_kv.layout.layout import KvDescriptor, WorkerRef
from headrace_kv.receive.receiver import Receiver
from headrace_kv.receive.service import HandoffServicer
from headrace_kv.receive.verification import DigestChecks

PROG = "headrace-decode"
SERVICES = (
    "headrace.decode.v1.DecodeService",
    "headrace.kv.v1.HandoffService",
    "headrace.worker.v1.WorkerService",
)
# Engines keep one block for themselves: vLLM's null block.
ENGINE_OWN_BLOCKS = 1
QUIET_WAIT_S = 1.0
# Until routers have heard that the worker leaves, what they send still gets an answer.
NOTICE_S = 0.3


def main() -> None:
    """Runs until SIGTERM."""
    run_service(
        PROG,
        lambda: serve(load_config(DecodeConfig, None, prog=PROG, env_prefix="HEADRACE_DECODE_")),
    )


async def serve(config: DecodeConfig) -> None:
    """Runs the workers of this process until a signal comes."""
    setup_logging(config.log_level, "decode", config.worker_id)
    await host_workers("decode", config, no_descriptors, serve_worker)


async def no_descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
    """Decode workers write to nobody."""
    raise InternalError(f"a decode worker asked for the KV memory of {ref}")


async def serve_worker(host: WorkerHost, hosted: HostedWorker[DecodeConfig]) -> None:
    """Serves one worker for as long as `host` says."""
    config, ref, engine = hosted.config, hosted.ref, hosted.engine
    checks = _digest_checks(config, engine)
    receiver = Receiver(
        ref=ref,
        layout=engine.descriptor.layout,
        lease_ttl_s=config.lease_ttl_s,
        on_released=engine.released,
        quarantine_s=config.quarantine_s,
        features=tuple(filter(None, (engine.broadcast, checks))),
    )
    membership: WorkerMembership | None = None
    service = DecodeService(
        ref=ref,
        engine=engine,
        receiver=receiver,
        admission=Admission(_capacity(config, engine)),
        telemetry=host.telemetry.for_worker(ref.worker_id),
        request_timeout_s=config.request_timeout_s,
        ticket_key=lambda: membership.ticket_key if membership is not None else b"",
        require_ticket=config.require_ticket,
    )
    server = GrpcServer(config, SERVICES)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(service, server.server)
    handoff_pb2_grpc.add_HandoffServiceServicer_to_server(HandoffServicer(receiver), server.server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(
        WorkerStatusServicer(
            service.status, engine.prefix_events, engine.reset_prefix_cache, server.request_drain
        ),
        server.server,
    )
    endpoint = await server.start()
    server.set_serving(False)
    member = worker_member(
        config,
        role=registry_pb2.Member.ROLE_DECODE,
        ref=ref,
        endpoint=endpoint,
        engine=engine,
        start_unix_ns=hosted.start_unix_ns,
    )
    membership = WorkerMembership(
        config, host, member, engine.descriptor, prefix_events=engine.prefix_events
    )

    async def drain(deadline: Deadline) -> None:
        service.begin_drain(min(NOTICE_S, deadline.remaining_s()))
        await membership.leave()
        await service.finish(deadline)
        # Blocks in quarantine go with the process; only ranks about to fall quiet are waited for.
        await receiver.drain(min(QUIET_WAIT_S, config.drain_grace_s))

    try:
        await membership.join()
        server.set_serving(True)
        with host.metrics.following(ref.worker_id, service.status, blocks=True):
            await host.serve(endpoint, server, drain)
    finally:
        await membership.leave()
        if checks is not None:
            # The engine's memory goes next.
            await asyncio.to_thread(checks.close)


def _digest_checks(config: DecodeConfig, engine: Engine) -> DigestChecks | None:
    if config.digest == "off":
        return None
    if engine.landed_memory is None:
        raise ConfigError(
            f'digest is "{config.digest}", but this engine keeps its KV memory in other processes: set it to "off"'
        )
    return DigestChecks(
        engine.descriptor,
        config.digest,
        memory=engine.landed_memory,
        mismatch_limit=config.digest_mismatch_limit,
    )


def _capacity(config: DecodeConfig, engine: Engine) -> Capacity:
    return Capacity(
        usable_blocks=engine.descriptor.ranks[0].block_count - ENGINE_OWN_BLOCKS,
        # A state is one block, however long the context.
        block_tokens=engine.descriptor.layout.groups[0].block_tokens or engine.max_model_len,
        max_model_len=engine.max_model_len,
        max_num_seqs=config.max_num_seqs,
    )
