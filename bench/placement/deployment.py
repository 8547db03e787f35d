"""Real services with simulated workers, and a router in this process, so that its placement can be replaced."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from bench.placement.trace import Tally
from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_cli.up.supervisor import Supervisor
from headrace_cli.up.topology import Topology, registry_spec, worker_specs
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.identity import new_incarnation
from headrace_common.registry.membership import Membership
from headrace_common.registry.view import RegistryView
from headrace_common.rpc.channel import open_channel
from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import init_telemetry
from headrace_common.tickets import SigningKey
from headrace_router.app import Router
from headrace_router.config import RouterConfig
from headrace_router.placement import Placement
from headrace_text.load import ByteCodec

CACHE_TOKENS = 10_240
BLOCK_TOKENS = 32
LOCAL_TOKENS = 256
SETTINGS = (
    ("prefill", "model", "sim:prefill_s_per_token=0.0004"),
    ("decode", "model", "sim:prefill_s_per_token=0.0004,decode_step_s=0.008"),
    *(
        (service, name, str(value))
        for service in ("prefill", "decode")
        for name, value in (
            ("num_gpu_blocks_override", CACHE_TOKENS // BLOCK_TOKENS),
            ("block_size", BLOCK_TOKENS),
        )
    ),
    ("decode", "max_num_seqs", "32"),
)


@asynccontextmanager
async def workers_running(prefill_count: int, decode_count: int) -> AsyncIterator[str]:
    """Starts registry and workers as processes, with the policy of the benchmark. Yields the registry's endpoint."""
    topology = Topology(
        engine="sim", prefill_count=prefill_count, decode_count=decode_count, settings=SETTINGS
    )
    supervisor = Supervisor()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        await supervisor.open()
        try:
            registry = await supervisor.start(registry_spec(topology, folder))
            await supervisor.wait_ready([registry])
            specs = worker_specs(topology, folder, registry.endpoint)
            await supervisor.wait_ready([await supervisor.start(spec) for spec in specs])
            operator = Credentials(role=Role.OPERATOR)
            async with open_channel(registry.endpoint, operator) as channel:
                policy = registry_pb2.Policy(local_prefill_max_tokens=LOCAL_TOKENS)
                stub = registry_pb2_grpc.RegistryServiceStub(channel)
                await stub.SetPolicy(registry_pb2.SetPolicyRequest(policy=policy), timeout=5)
            yield registry.endpoint
        finally:
            await supervisor.stop()


@asynccontextmanager
async def router_of(
    registry: str, placement: Placement, router_id: str = "router-0", **more: str
) -> AsyncIterator[tuple[Router, str]]:
    """A router in this process, assembled as by its own main. `more` are further settings."""
    settings: dict[str, Any] = {"model": "sim", "registry": registry, **more}
    config = RouterConfig(**settings)
    async with AsyncExitStack() as stack:
        telemetry = init_telemetry("router", router_id, config)
        stack.push_async_callback(asyncio.to_thread, telemetry.shutdown)
        channel = await stack.enter_async_context(open_channel(registry, config))
        view = RegistryView(channel, on_change=lambda view: router.update(view.members.values()))
        membership: Membership | None = None
        ticket_key = SigningKey()
        router = Router(
            config,
            {"sim": ByteCodec()},
            telemetry,
            lambda: view.policy,
            lambda: membership.prefix_hash_key if membership else 0,
            ticket_key,
            placement,
        )
        stack.push_async_callback(router.close)
        stack.push_async_callback(view.stop)
        await view.start()
        server = router.services.new_server(config)
        stack.push_async_callback(server.stop, None)
        endpoint = await server.start()
        member = registry_pb2.Member(
            worker_id=router_id,
            incarnation=new_incarnation(),
            role=registry_pb2.Member.ROLE_ROUTER,
            endpoint=endpoint,
            client_endpoint=server.client_endpoint,
            start_unix_ns=time.time_ns(),
        )
        membership = Membership(channel, member)
        stack.push_async_callback(membership.stop)
        await membership.start()
        yield router, server.client_endpoint


async def wait_joined(router: Router, prefill_count: int, decode_count: int) -> None:
    """Waits until the router uses these numbers of workers."""
    for _ in range(600):
        table = router.workers.table("sim")
        pulling = router.queue.workers.counts().get("sim", 0)
        if pulling == prefill_count and len(table) == decode_count and table.reachable.all():
            return
        await asyncio.sleep(0.05)
    raise TimeoutError("not every worker joined")


async def computed_tokens(router: Router, tally: Tally) -> int:
    """Prompt tokens that workers computed, by the spans of remote prefills."""
    computed = sum(
        prompt - cached
        for trace_id, (prompt, cached) in tally.trace_ids.items()
        if trace_id not in tally.remote
    )
    for trace_id in tally.remote:
        computed += await _prefilled_in_time(router, trace_id)
    return computed


async def _prefilled_in_time(router: Router, trace_id: str) -> int:
    for _ in range(300):
        tokens = _prefilled(router, trace_id)
        if tokens is not None:
            return tokens
        await asyncio.sleep(0.05)
    raise TimeoutError(f"the prefill worker's spans of {trace_id} did not come")


def _prefilled(router: Router, trace_id: str) -> int | None:
    trace = router.traces.get(trace_id)
    spans = [span for span in trace.spans if span.name == schema.SPAN_PREFILL_COMPUTE]
    if not spans:
        return None
    return sum(int(span.attributes[schema.ATTRIBUTE_TOKENS]) for span in spans)
