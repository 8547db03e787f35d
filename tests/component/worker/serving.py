"""Workers in one process, with simulated engines, behind a real router and a real registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
from pydantic import SecretStr

from headrace.inference.v1 import inference_pb2, trace_pb2
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.client import worker_status
from headrace_common.identity import new_incarnation
from headrace_common.registry.view import RegistryView
from headrace_decode.config import DecodeConfig
from headrace_decode.main import DecodeServer
from headrace_engine.config import WorkerRole
from headrace_engine.connector.step_executor import StepExecutor
from headrace_engine.factory import build_engine
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import parse_settings
from headrace_engine.worker.adapters import WorkerAdapters
from headrace_engine.worker.config import engine_config, worker_configs
from headrace_engine.worker.host import HostedWorker, WorkerHost
from headrace_engine.worker.process import RegistryDescriptors
from headrace_engine.worker.serve import serve_worker
from headrace_kv.layout import WorkerRef
from headrace_prefill.config import PrefillConfig
from headrace_prefill.main import PrefillServer
from headrace_registry.config import RegistryConfig
from headrace_worker.config import BothConfig
from headrace_worker.main import BothServer
from tests.component.registry.harness import joined, running_registry, viewing
from tests.in_memory_transport import KIND
from tests.kit import router as rig_module
from tests.kit.router import Rig
from tests.waiting import until

MODEL = "sim:vocabulary=32000"


@dataclass(frozen=True, slots=True)
class Workers:
    """The router, and the workers by name. `form` has their answers."""

    form: SimModel
    rig: Rig
    members: dict[str, registry_pb2.Member]
    serving: dict[str, asyncio.Task[None]]
    engines: dict[str, HostedWorker[Any]]

    async def check(
        self, request: inference_pb2.GenerateRequest, started: asyncio.Event | None = None
    ) -> tuple[str, str]:
        """The prefill and the decode worker of a request. Its answer must be the model's."""
        tokens: list[int] = []
        last = inference_pb2.GenerateResponse()
        async for last in self.rig.stub.Generate(request, timeout=30):
            tokens += last.token_ids
            if started is not None and tokens:
                started.set()
        count = request.sampling.max_tokens
        assert tuple(tokens) == self.form.expected_tokens(request.tokens.ids, count)
        return last.timing.prefill_worker_id, last.timing.decode_worker_id

    async def status(self, name: str) -> worker_pb2.WatchStatusResponse:
        return await worker_status(self.members[name].endpoint)

    async def wait_idle(self) -> None:
        """Waits until no worker that serves has a request or holds a block."""

        async def idle() -> bool:
            found = [
                await self.status(name) for name, task in self.serving.items() if not task.done()
            ]
            return not any(
                one.running_requests or one.waiting_requests or one.reserved_blocks for one in found
            )

        await until(idle)


_SERVERS: dict[WorkerRole, Any] = {
    "both": (BothConfig, BothServer),
    "prefill": (PrefillConfig, PrefillServer),
    "decode": (DecodeConfig, DecodeServer),
}


@asynccontextmanager
async def running(
    model: str = MODEL, *, roles: dict[WorkerRole, int] | None = None, **more: object
) -> AsyncIterator[Workers]:
    """So many workers of each role serve, two of both roles by default. The router sees their prefix caches."""
    counts: dict[WorkerRole, int] = roles or {"both": 2}
    async with AsyncExitStack() as held:
        secret = RegistryConfig.model_validate(
            {"insecure": True, "prefix_hash_key": SecretStr("of this test, long enough")}
        )
        key = secret.read_prefix_hash_key()
        held.enter_context(mock.patch.object(rig_module, "PREFIX_KEY", key))
        registry = await held.enter_async_context(
            running_registry(prefix_hash_key=secret.prefix_hash_key)
        )
        rig = await Rig().start()
        held.push_async_callback(rig.close)
        router = registry_pb2.Member(
            worker_id="router-0",
            incarnation=new_incarnation(),
            role=registry_pb2.Member.ROLE_ROUTER,
            endpoint=rig.internal_endpoint,
            client_endpoint=rig.endpoint,
            start_unix_ns=time.time_ns(),
        )
        await held.enter_async_context(joined(registry.endpoint, router))
        hosted: dict[str, HostedWorker[Any]] = {}
        serving: dict[str, asyncio.Task[None]] = {}
        for role, count in counts.items():
            kind, server = _SERVERS[role]
            config = kind.model_validate(
                {
                    "registry": registry.endpoint,
                    "worker_id": "worker" if role == "both" else role,
                    "model": model,
                    "workers_per_process": count,
                    "insecure": True,
                    **{name: one for name, one in more.items() if name in kind.model_fields},
                }
            )
            descriptors = RegistryDescriptors()
            host = WorkerHost(role, config)
            for own in worker_configs(config):
                ref = WorkerRef(own.worker_id, new_incarnation())
                settings = engine_config(own, role=role, ref=ref)
                engine = build_engine(replace(settings, transport=KIND), descriptors)
                await engine.start()
                held.push_async_callback(engine.close)
                hosted[own.worker_id] = HostedWorker(
                    own, ref, engine, time.time_ns(), WorkerAdapters(ref, engine, ())
                )
                serving[own.worker_id] = asyncio.create_task(
                    serve_worker(host, hosted[own.worker_id], server)
                )
            held.push_async_callback(host.close)
            descriptors.connect(host.descriptors)

        async def stop() -> None:
            for task in serving.values():
                task.cancel()
            await asyncio.gather(*serving.values(), return_exceptions=True)

        held.push_async_callback(stop)
        members: dict[str, registry_pb2.Member] = {}

        def changed(view: RegistryView) -> None:
            found = [one for one in view.members.values() if one.worker_id in hosted]
            members.update({one.worker_id: one for one in found})
            rig.router.update(found)

        await held.enter_async_context(viewing(registry.endpoint, changed))
        pulling = {name for name in hosted if not name.startswith("decode")}
        generating = [name for name in hosted if not name.startswith("prefill")]
        await until(lambda: rig.pulling() == pulling)
        await until(lambda: len(rig.router.workers.table("sim").reachable) == len(generating))
        await until(lambda: bool(rig.router.workers.table("sim").reachable.all()))
        yield Workers(SimModel(parse_settings(model)), rig, members, serving, hosted)


def start_ns(span: trace_pb2.Span) -> int:
    return span.start_time.ToNanoseconds()


def end_ns(span: trace_pb2.Span) -> int:
    return start_ns(span) + span.duration.ToNanoseconds()


def lose_layers(
    monkeypatch: pytest.MonkeyPatch,
    first_layer: int,
    *,
    silent: bool,
    chosen: Callable[[str], bool] = lambda _: True,
) -> set[str]:
    """From a layer on, the first computation of a chosen transfer sends nothing: its sender stops, or is only late.

    Returns the set that then has its transfers.
    """
    lost = set[str]()
    written = StepExecutor.layer_written

    def lose(executor: StepExecutor, number: int) -> None:
        found = {one.transfer_id for one in executor._computed}
        if number >= first_layer and not lost and any(map(chosen, found)):
            lost.update(found)
            if not silent:
                for name in found:
                    executor.stop(name)
        if found.isdisjoint(lost):
            written(executor, number)

    monkeypatch.setattr(StepExecutor, "layer_written", lose)
    return lost
