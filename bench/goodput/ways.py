"""The ways that the goodput benchmark compares, by name. Each starts its engines, and has a call that sends.

plain-alternating, plain-least: vLLM engines behind a balancer, in turn or with the fewest requests first.
mooncake-P-D: vLLM's MooncakeConnector, P prefill and D decode engines, with the fewest requests first.
pools-P-D[-divided][-FIRST]: Headrace, P prefill and D decode workers. FIRST is decode, prefill or hidden. With
    `divided`, two prefill workers compute a prompt together.
both: Headrace, workers of both roles. Requests carry their bounds.
planned: the same, where the planner decides on the number of workers. It starts with one.
pools-P-D-http, both-http: the same over HTTP.
router-POLICY: vllm-router with a policy of its own or "default", before `vllm serve`, over HTTP.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from bench.goodput.http import by_http, start_router
from bench.goodput.load import Ask
from bench.goodput.report import Objective
from bench.handover.__main__ import peer_id, receiving, sending
from bench.support.vllm_child import TIMES_VARIABLE, Child, engine, loaded
from bench.support.vllm_ways import (
    BLOCK_TOKENS,
    DECODE,
    DEFAULT,
    HIDDEN,
    PREFILL,
    Ours,
    engine_arguments,
    pieces_of,
)
from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_cli.client import (
    open_router,
    open_router_internally,
    policy_by,
    started_channel,
)
from headrace_cli.up.deployment import Signals, deployed
from headrace_cli.up.keeping import NO_RESTARTS, keep
from headrace_cli.up.topology import Topology
from headrace_common.ports import free_port

_SEQUENCES: Final = 64
_CONTEXT_TOKENS: Final = 16_384
_DIVIDE_GAIN: Final = 0.15
_FIRST: Final = {"decode": DECODE, "prefill": PREFILL, "hidden": HIDDEN}


@dataclass(frozen=True, slots=True)
class Engines:
    """What all ways have in common: the model, the number of engines, and the tokens of a step."""

    model: Path
    count: int
    step_tokens: int
    folder: Path
    cache_tokens: int
    alone: Objective

    async def start(self, stack: AsyncExitStack, way: str) -> Ask:
        """Starts the engines of a way. They end with the stack. Raises ValueError for an unknown one."""
        kind, _, rest = way.partition("-")
        self.folder.mkdir(parents=True)
        if kind == "plain" and rest in ("alternating", "least"):
            children = [await self._engine(stack, f"engine-{i}") for i in range(self.count)]
            await loaded(*children)
            return by_turns(children) if rest == "alternating" else by_load(children)
        if kind == "mooncake":
            prefill, decode = map(int, rest.split("-"))
            return await self._mooncake(stack, prefill, decode)
        if kind == "router":
            return await start_router(stack, rest, self.count, self._arguments(), self.folder)
        if kind == "pools":
            computing, generating, *first = rest.split("-")
            pools = await self.headrace(stack, self.topology(int(computing), int(generating), 0))
            if "divided" in first:
                first.remove("divided")
                await divide(pools)
            if "http" in first:
                return await by_http(stack, pools.http, self.model.name, bounded=False)
            return by_pools(pools, _FIRST[first[0] if first else "decode"])
        if kind == "planned":
            return by_both(await self._planned(stack))
        if kind == "both":
            workers = await self.headrace(stack, self.topology(0, 0, self.count))
            if rest == "http":
                return await by_http(stack, workers.http, self.model.name, bounded=True)
            return by_both(workers)
        raise ValueError(f"{way} is no way: {__doc__}")

    def _arguments(self, **more: Any) -> dict[str, Any]:
        """vLLM's arguments of an engine."""
        return {
            **engine_arguments(self.model, "float32", self.cache_tokens, **more),
            "max_num_seqs": _SEQUENCES,
            "max_num_batched_tokens": self.step_tokens,
            "max_model_len": _CONTEXT_TOKENS,
        }

    async def _engine(
        self,
        stack: AsyncExitStack,
        name: str,
        environment: dict[str, str] | None = None,
        **more: Any,
    ) -> Child:
        arguments = self._arguments(**more)
        log = self.folder / f"{name}.log"
        return await stack.enter_async_context(engine(arguments, log, environment or {}))

    async def _mooncake(self, stack: AsyncExitStack, prefill: int, decode: int) -> Ask:
        """Engines that vLLM's own connector pairs."""
        ports = [free_port() for _ in range(prefill)]
        roles = [("kv_producer", port) for port in ports] + [("kv_consumer", free_port())] * decode
        children = []
        for number, (role, port) in enumerate(roles):
            transfer = {
                "kv_connector": "TimedMooncakeConnector",
                "kv_connector_module_path": "bench.support.vllm_peer",
                "kv_role": role,
                "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 2},
            }
            name = f"{role}-{number}"
            environment = {
                "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port),
                TIMES_VARIABLE: str(self.folder / f"{name}.jsonl"),
            }
            children.append(
                await self._engine(stack, name, environment, kv_transfer_config=transfer)
            )
        await loaded(*children)
        return by_pairs(children[:prefill], children[prefill:], ports)

    def topology(self, prefill: int, decode: int, both: int) -> Topology:
        """Services with so many workers of each kind."""
        settings = {
            "dtype": "float32",
            "max_num_seqs": str(_SEQUENCES),
            "max_num_batched_tokens": str(self.step_tokens),
            "max_model_len": str(_CONTEXT_TOKENS),
            "num_gpu_blocks_override": str(self.cache_tokens // BLOCK_TOKENS),
        }
        services = ("worker",) if both else ("prefill", "decode")
        return Topology(
            model=str(self.model),
            prefill_count=prefill,
            decode_count=decode,
            worker_count=both,
            port=free_port(),
            http_port=free_port(),
            settings=tuple(
                (service, name, value) for service in services for name, value in settings.items()
            ),
        )

    async def _planned(self, stack: AsyncExitStack) -> Ours:
        """A worker of both roles, and a planner that adds others. Goals are five and two times those alone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rules = self.folder / "planner.toml"
        rules.write_text(
            f"[goals]\nttft_s = {5e-3 * self.alone.ttft_ms}\nitl_s = {2e-3 * self.alone.tpot_ms}\nshare = 0.99\n"
            f"[budget]\ndevices_max = {self.count}\n"
        )
        planner = {"settings_file": str(rules), "interval_s": "10", "sample_interval_s": "2"}
        topology = self.topology(0, 0, 1)
        settings = (*topology.settings, *(("planner", *one) for one in planner.items()))
        topology = replace(topology, planner=True, settings=settings)
        workers = await self.headrace(stack, topology)
        console = Console(file=stack.enter_context((self.folder / "planner.log").open("w")))
        keeping = asyncio.create_task(keep(topology, workers.deployment, console, NO_RESTARTS))

        async def end() -> None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

        stack.push_async_callback(end)
        return workers

    async def headrace(self, stack: AsyncExitStack, topology: Topology) -> Ours:
        """Starts the services."""
        folder = self.folder / "services"
        await asyncio.to_thread(folder.mkdir, parents=True)
        console = stack.enter_context((self.folder / "console.log").open("w"))
        deployment = await stack.enter_async_context(
            deployed(topology, folder, Console(file=console), Signals())
        )
        router = await stack.enter_async_context(open_router(deployment.router))
        operator = await stack.enter_async_context(
            open_router_internally(deployment.router_internal)
        )
        return Ours(deployment, router, operator, topology.http_listen)


async def divide(pools: Ours) -> None:
    """Two idle prefill workers compute a prompt, where that saves 15 % of its time."""
    registry = pools.deployment.registry
    async with started_channel(registry) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        policy = (await policy_by(stub, registry)).policy
        policy.divide_gain = _DIVIDE_GAIN
        await stub.SetPolicy(registry_pb2.SetPolicyRequest(policy=policy))


def by_turns(children: list[Child]) -> Ask:
    """Alternates between engines."""

    async def ask(
        prompt: list[int], count: int, number: int, objective: Objective | None
    ) -> AsyncIterator[int]:
        del objective
        async for piece in children[number % len(children)].generate(prompt, count):
            for _ in piece.token_ids:
                yield piece.heard_unix_ns

    return ask


class _Held:
    """The requests that each engine of a group has."""

    def __init__(self, count: int) -> None:
        self._counts = [0] * count

    def take(self) -> int:
        """The engine with the fewest, which has one more from now on."""
        chosen = self._counts.index(min(self._counts))
        self._counts[chosen] += 1
        return chosen

    def give_back(self, engine: int) -> None:
        """One has ended."""
        self._counts[engine] -= 1


def by_load(children: list[Child]) -> Ask:
    """Chooses the engine with the fewest requests."""
    held = _Held(len(children))

    async def ask(
        prompt: list[int], count: int, number: int, objective: Objective | None
    ) -> AsyncIterator[int]:
        del number, objective
        chosen = held.take()
        try:
            async for piece in children[chosen].generate(prompt, count):
                for _ in piece.token_ids:
                    yield piece.heard_unix_ns
        finally:
            held.give_back(chosen)

    return ask


def by_pairs(prefill: list[Child], decode: list[Child], ports: list[int]) -> Ask:
    """Sends each request to the prefill engine and the decode engine with the fewest, as vLLM's proxy does."""
    ids = [""] * len(prefill)
    computing, generating = _Held(len(prefill)), _Held(len(decode))

    async def ask(
        prompt: list[int], count: int, number: int, objective: Objective | None
    ) -> AsyncIterator[int]:
        del number, objective
        first, second = computing.take(), generating.take()
        ids[first] = ids[first] or await asyncio.to_thread(peer_id, ports[first])
        transfer = uuid.uuid4().hex
        made = asyncio.create_task(pieces_of(prefill[first].generate(prompt, 1, sending(transfer))))
        made.add_done_callback(lambda _: computing.give_back(first))
        wanted = receiving(transfer, ids[first], ports[first])
        try:
            async for piece in decode[second].generate(prompt, count, wanted):
                for _ in piece.token_ids:
                    yield piece.heard_unix_ns
        finally:
            generating.give_back(second)
            made.cancel()

    return ask


def by_pools(pools: Ours, first_token: int) -> Ask:
    """Sends a request to the services. Their prefill workers compute all prompts."""

    async def ask(
        prompt: list[int], count: int, number: int, objective: Objective | None
    ) -> AsyncIterator[int]:
        del number, objective
        async for response, now_ns in pools.generate(prompt, count, first_token):
            for _ in response.token_ids:
                yield now_ns

    return ask


def by_both(workers: Ours) -> Ask:
    """Sends a request to the services with its bounds. Without bounds, the router has its defaults."""

    async def ask(
        prompt: list[int], count: int, number: int, objective: Objective | None
    ) -> AsyncIterator[int]:
        del number
        assert objective is not None
        targets_s = (1e-3 * objective.ttft_ms, 1e-3 * objective.tpot_ms)
        async for response, now_ns in workers.generate(prompt, count, DEFAULT, targets_s):
            for _ in response.token_ids:
                yield now_ns

    return ask
