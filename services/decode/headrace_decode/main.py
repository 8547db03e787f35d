"""The decode worker's process, from settings to the last request."""

from __future__ import annotations

import asyncio
import time

from headrace.decode.v1 import decode_pb2_grpc
from headrace.kv.v1 import handoff_pb2_grpc
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2_grpc
from headrace_common.config import load_config
from headrace_common.deadlines import Deadline
from headrace_common.errors import InternalError
from headrace_common.identity import new_incarnation
from headrace_common.logs import setup_logging
from headrace_common.run import run_service
from headrace_common.server import GrpcServer
from headrace_common.telemetry import init_telemetry
from headrace_decode.admission import Admission, Capacity
from headrace_decode.config import DecodeConfig
from headrace_decode.service import DecodeService
from headrace_engine.factory import build_engine
from headrace_engine.interface import Engine
from headrace_engine.worker_config import engine_config, worker_member
from headrace_engine.worker_membership import WorkerMembership
from headrace_engine.worker_status import WorkerStatusServicer
from headrace_kv.handoff_server import HandoffServicer
from headrace_kv.layout import KvDescriptor, WorkerRef
from headrace_kv.receiver import Receiver

PROG = "headrace-decode"
SERVICES = (
    "headrace.decode.v1.DecodeService",
    "headrace.kv.v1.HandoffService",
    "headrace.worker.v1.WorkerService",
)
# Engines keep one block for themselves: vLLM's null block.
ENGINE_OWN_BLOCKS = 1
QUIET_WAIT_S = 1.0


def main() -> None:
    """Runs until SIGTERM."""
    run_service(
        PROG,
        lambda: serve(load_config(DecodeConfig, None, prog=PROG, env_prefix="HEADRACE_DECODE_")),
    )


async def serve(config: DecodeConfig) -> None:
    """Starts the engine, then everything that talks, and serves until a signal comes.

    The engine comes first: it may start processes of its own, which must not inherit gRPC's
    threads.
    """
    setup_logging(config.log_level, "decode", config.worker_id)
    start_unix_ns = time.time_ns()
    ref = WorkerRef(config.worker_id, new_incarnation())
    engine = build_engine(engine_config(config, role="decode", ref=ref), no_descriptors)
    try:
        await engine.start()
        await _serve(config, ref, engine, start_unix_ns)
    finally:
        await engine.close()


async def no_descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
    """Decode workers write to nobody."""
    raise InternalError(f"a decode worker asked for the KV memory of {ref}")


async def _serve(config: DecodeConfig, ref: WorkerRef, engine: Engine, start_unix_ns: int) -> None:
    telemetry = init_telemetry("decode", config.worker_id, config)
    receiver = Receiver(
        ref=ref,
        layout=engine.descriptor.layout,
        lease_ttl_s=config.lease_ttl_s,
        on_released=engine.released,
        quarantine_s=config.quarantine_s,
    )
    service = DecodeService(
        ref=ref,
        engine=engine,
        receiver=receiver,
        admission=Admission(_capacity(config, engine)),
        telemetry=telemetry,
        request_timeout_s=config.request_timeout_s,
    )
    server = GrpcServer(config, SERVICES)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(service, server.server)
    handoff_pb2_grpc.add_HandoffServiceServicer_to_server(HandoffServicer(receiver), server.server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(
        WorkerStatusServicer(service.status), server.server
    )
    endpoint = await server.start()
    server.set_serving(False)
    member = worker_member(
        config,
        role=registry_pb2.Member.ROLE_DECODE,
        ref=ref,
        endpoint=endpoint,
        engine=engine,
        start_unix_ns=start_unix_ns,
    )
    membership = WorkerMembership(config, member, engine.descriptor, telemetry)

    async def drain() -> None:
        service.begin_drain()
        await membership.leave()
        await service.wait_idle()
        # Blocks in quarantine go with the process; only ranks about to fall quiet are waited for.
        await receiver.drain(min(QUIET_WAIT_S, config.drain_grace_s))

    try:
        await membership.join()
        server.set_serving(True)
        await server.serve_until_signal(drain)
    finally:
        await membership.close()
        await asyncio.to_thread(telemetry.shutdown)


def _capacity(config: DecodeConfig, engine: Engine) -> Capacity:
    return Capacity(
        usable_blocks=engine.descriptor.ranks[0].block_count - ENGINE_OWN_BLOCKS,
        block_tokens=engine.descriptor.layout.block_tokens,
        context_tokens=engine.context_tokens,
        max_requests=config.max_requests,
    )
