"""A deployment of simulated workers with mutual TLS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import grpc.aio
import pytest

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_cli.up.supervisor import Child, Supervisor
from headrace_cli.up.topology import Topology, registry_spec, router_spec, worker_specs
from tests.fork_server import forking
from tests.suite.certificates import Authority

SERVICES = ("registry", "router", "prefill", "decode")


@asynccontextmanager
async def deployed(
    folder: Path, authority: Authority, more: tuple[tuple[str, str, str], ...] = ()
) -> AsyncIterator[dict[str, Child]]:
    """Registry, router and one worker of each role, each with a certificate of its role."""
    settings = tuple(
        (service, field, value)
        for service in SERVICES
        for field, value in asdict(authority.sign(service, service)).items()
    )
    settings += more
    topology = Topology(engine="sim", port=0, settings=settings)
    async with forking() as spawn:
        supervisor = Supervisor(spawn=spawn)
        await supervisor.open()
        try:
            registry = await supervisor.start(registry_spec(topology, folder))
            await supervisor.wait_ready([registry])
            for spec in (
                router_spec(topology, folder, registry.endpoint),
                *worker_specs(topology, folder, registry.endpoint),
            ):
                await supervisor.start(spec)
            async with asyncio.timeout(20):
                await supervisor.wait_ready(supervisor.children)
            yield {child.spec.service: child for child in supervisor.children}
        finally:
            unclean = await supervisor.stop()
    assert unclean == []


async def joined(channel: grpc.aio.Channel, key: str = "") -> None:
    metadata = (("x-api-key", key),) if key else ()
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    give_up = time.monotonic() + 15
    while time.monotonic() < give_up:
        request = inference_pb2.ListModelsRequest()
        models = (await stub.ListModels(request, timeout=5, metadata=metadata)).models
        if any(model.prefill_worker_count and model.decode_worker_count for model in models):
            return
        await asyncio.sleep(0.05)
    pytest.fail("the workers did not join")
