"""Two workers of both roles in one process, with simulated engines, behind a real router and a real registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from unittest import mock

import pytest
from pydantic import SecretStr

from headrace.inference.v1 import inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_cli.client import worker_status
from headrace_common.durations import duration_from_seconds
from headrace_common.identity import new_incarnation
from headrace_common.registry.view import RegistryView
from headrace_engine.factory import build_engine
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import parse_settings
from headrace_engine.worker.adapters import WorkerAdapters
from headrace_engine.worker.config import engine_config, worker_configs
from headrace_engine.worker.host import HostedWorker, WorkerHost
from headrace_engine.worker.metrics import WorkerMetrics
from headrace_engine.worker.process import RegistryDescriptors
from headrace_engine.worker.serve import serve_worker
from headrace_kv.layout import WorkerRef
from headrace_registry.config import RegistryConfig
from headrace_worker.config import BothConfig
from headrace_worker.main import BothServer
from tests.channels import operator_channel
from tests.component.registry.harness import joined, running_registry, viewing
from tests.in_memory_transport import KIND
from tests.kit import router as rig_module
from tests.kit.router import Rig
from tests.suite.deployment import greedy, prompt_of
from tests.waiting import until

MODEL = "sim:vocabulary=32000"
CLOSED_FORM = SimModel(parse_settings(MODEL))
NAMES = {"worker-0", "worker-1"}
TURNS_MAX = 20
ANY = inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED
LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE


@dataclass(frozen=True, slots=True)
class Pair:
    """The router, and both workers by name."""

    rig: Rig
    members: dict[str, registry_pb2.Member]
    serving: dict[str, asyncio.Task[None]]
    engines: dict[str, HostedWorker[BothConfig]]

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
        assert tuple(tokens) == CLOSED_FORM.expected_tokens(request.tokens.ids, count)
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


@asynccontextmanager
async def running(model: str = MODEL, **more: object) -> AsyncIterator[Pair]:
    """Both workers serve, and the router has both as prefill and as decode workers. It sees their prefix caches."""
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
        config = BothConfig.model_validate(
            {
                "registry": registry.endpoint,
                "worker_id": "worker",
                "engine": "sim",
                "model": model,
                "workers_per_process": 2,
                "insecure": True,
                **more,
            }
        )
        descriptors = RegistryDescriptors()
        hosted: dict[str, HostedWorker[BothConfig]] = {}
        for own in worker_configs(config):
            ref = WorkerRef(own.worker_id, new_incarnation())
            settings = engine_config(own, role="both", ref=ref)
            engine = build_engine(replace(settings, transport=KIND), descriptors)
            await engine.start()
            held.push_async_callback(engine.close)
            hosted[own.worker_id] = HostedWorker(
                own, ref, engine, time.time_ns(), WorkerAdapters(ref, engine, ())
            )
        host = WorkerHost("both", config)
        held.push_async_callback(host.close)
        descriptors.connect(host.descriptors)
        serving = {
            name: asyncio.create_task(serve_worker(host, one, BothServer))
            for name, one in hosted.items()
        }

        async def stop() -> None:
            for task in serving.values():
                task.cancel()
            await asyncio.gather(*serving.values(), return_exceptions=True)

        held.push_async_callback(stop)
        members: dict[str, registry_pb2.Member] = {}

        def changed(view: RegistryView) -> None:
            found = view.of_role(registry_pb2.Member.ROLE_BOTH)
            members.update({one.worker_id: one for one in found})
            rig.router.update(list(found))

        await held.enter_async_context(viewing(registry.endpoint, changed))
        await until(lambda: rig.pulling() == NAMES)
        await until(lambda: len(rig.router.workers.table("sim").reachable) == 2)
        await until(lambda: bool(rig.router.workers.table("sim").reachable.all()))
        yield Pair(rig, members, serving, hosted)


async def test_answers_are_the_same_wherever_prompts_are_computed() -> None:
    async with running() as pair:
        for seed, length in enumerate((2, 31, 33, 300)):
            prompt = prompt_of(length, seed)
            prefill, decode = await pair.check(greedy(prompt, 8, LOCAL))
            assert (prefill, decode in NAMES) == ("", True)
            request = greedy(prompt, 8, REMOTE)
            # Else the blocks of the first answer are found.
            request.cache_salt = "remote"
            assert set(await pair.check(request)) == NAMES
        asked = [greedy(prompt_of(40 + seed, seed), 6, ANY) for seed in range(24)]
        found = await asyncio.gather(*map(pair.check, asked))
        # Answers gather on few workers.
        assert {decode for _, decode in found} <= NAMES
        await pair.wait_idle()


async def test_a_worker_fetches_what_the_other_one_has_of_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetches: list[tuple[str, int]] = []
    monkeypatch.setattr(
        WorkerMetrics,
        "prefix_fetched",
        lambda metrics, worker_id, reason, token_count: fetches.append((reason, token_count)),
    )
    async with running(prefix_fetch_min_tokens=8, kv_fetch_timeout_s=20) as pair:
        prompt: list[int] = []
        for turn in range(TURNS_MAX):
            prompt += prompt_of(40, turn)
            assert set(await pair.check(greedy(prompt, 64, REMOTE))) == NAMES
            prompt += CLOSED_FORM.expected_tokens(prompt, 64)
            await pair.wait_idle()
            # Until the router has the events of the last turn, another worker may generate.
            if fetches:
                break
        ((reason, count),) = fetches
        # Blocks have 32 tokens.
        assert (reason, count >= 32) == ("", True)


async def test_a_worker_reports_its_own_requests_and_not_the_prompts_of_others() -> None:
    async with running(f"{MODEL},prefill_s_per_token=0.01") as pair:
        request = greedy(prompt_of(150, 1), 4, REMOTE)
        answer = asyncio.create_task(pair.check(request))
        # While it computes, the other worker holds the blocks.
        computing = ""

        async def computes() -> bool:
            nonlocal computing
            for name, one in pair.engines.items():
                usage = one.engine.usage()
                status = await pair.status(name)
                if usage.running_requests and not status.reserved_blocks:
                    assert not status.running_requests
                    assert not status.waiting_requests
                    computing = name
            return bool(computing)

        await until(computes)
        prefill, decode = await answer
        assert prefill == computing
        assert decode == (NAMES - {computing}).pop()
        await pair.wait_idle()


@pytest.mark.parametrize("placement", [LOCAL, REMOTE, ANY])
async def test_a_drained_worker_ends_and_no_request_is_lost(
    placement: inference_pb2.PrefillPlacement.ValueType,
) -> None:
    async with running(f"{MODEL},decode_step_s=0.005") as pair:
        asked = [greedy(prompt_of(40 + seed, seed), 40, placement) for seed in range(8)]
        starts = [asyncio.Event() for _ in asked]
        answers = [
            asyncio.create_task(pair.check(request, start))
            for request, start in zip(asked, starts, strict=True)
        ]
        await asyncio.gather(*(start.wait() for start in starts))
        async with operator_channel(pair.members["worker-0"].endpoint) as channel:
            grace = duration_from_seconds(20)
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            await stub.Drain(
                worker_pb2.DrainRequest(
                    incarnation=pair.members["worker-0"].incarnation, grace=grace
                ),
                timeout=5,
            )
        found = await asyncio.gather(*answers)
        assert {decode for _, decode in found} <= NAMES
        await asyncio.wait_for(asyncio.shield(pair.serving["worker-0"]), 20)
        await until(lambda: pair.rig.pulling() == {"worker-1"})
        # The worker that is left computes its prompts itself.
        assert await pair.check(greedy(prompt_of(50, 99), 6, ANY)) == ("", "worker-1")
        await pair.wait_idle()
