"""Shared parts of the benchmarks with real engines: deployments, peers, prompts, CPU, and quiet machines."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from rich.console import Console

from bench.support.vllm_child import TIMES_VARIABLE, Child, Piece, engine
from headrace.inference.v1 import first_token_pb2, inference_pb2, sampling_pb2, trace_pb2
from headrace_cli.client import (
    RouterClient,
    open_router,
    open_router_internally,
    reset_prefix_cache,
)
from headrace_cli.up.deployment import Deployment, Signals, deployed
from headrace_cli.up.topology import WORKER_SERVICES, Topology
from headrace_common.durations import duration_from_seconds
from headrace_common.ports import free_port
from headrace_common.telemetry import schema
from headrace_common.trace_view.reading import read_trace

DEFAULT: Final = first_token_pb2.FIRST_TOKEN_POLICY_UNSPECIFIED
DECODE: Final = first_token_pb2.FIRST_TOKEN_POLICY_DECODE
PREFILL: Final = first_token_pb2.FIRST_TOKEN_POLICY_PREFILL
HIDDEN: Final = first_token_pb2.FIRST_TOKEN_POLICY_HIDDEN
REMOTE: Final = inference_pb2.PREFILL_PLACEMENT_REMOTE
CONTEXT_TOKENS: Final = 2048
# vLLM's default on processors, and therefore ours.
BLOCK_TOKENS: Final = 128
REQUEST_S: Final = 120.0


def prompt_of(length: int, seed: int, token_ids: range = range(1000, 40_000)) -> list[int]:
    """Random tokens that share no prefix with those of other seeds."""
    numbers = random.Random(seed)
    return numbers.choices(token_ids, k=length)


class Tree:
    """A process with all its descendants."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids

    def processes(self) -> list[psutil.Process]:
        """The processes that run now."""
        found: list[psutil.Process] = []
        for pid in self._pids:
            root = psutil.Process(pid)
            found += [root, *root.children(recursive=True)]
        return found

    def cpu_s(self) -> float:
        """User and system time so far."""
        total_s = 0.0
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total_s += times.user + times.system
        return total_s

    def rss_bytes(self) -> int:
        """Resident memory. Shared pages count once for each process."""
        return sum(int(process.memory_info().rss) for process in self.processes())

    def pin(self, cpus: Collection[int]) -> None:
        """Confines every thread. Later threads inherit it."""
        for process in self.processes():
            for thread in process.threads():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, cpus)


@dataclass(frozen=True, slots=True)
class Ours:
    """A running deployment, and a client and an operator of its router."""

    deployment: Deployment
    router: RouterClient
    operator: RouterClient
    http: str
    """host:port of its OpenAI HTTP API."""

    def tree(self, *services: str) -> Tree:
        """The processes of these services, or of all services."""
        children = self.deployment.children
        return Tree(
            *(c.process.pid for c in children if not services or c.spec.service in services)
        )

    async def generate(
        self,
        token_ids: Iterable[int],
        count: int,
        first_token: int = DECODE,
        targets_s: tuple[float, float] | None = None,
    ) -> AsyncIterator[tuple[inference_pb2.GenerateResponse, int]]:
        """Sends a request through the router. Yields every message with its time, as `Child.generate` does.

        With `targets_s`, of the first token and of each later one, the router decides where the prompt is computed.
        """
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenIds(ids=token_ids),
            sampling=sampling_pb2.SamplingParams(
                temperature=0.0, max_tokens=count, ignore_eos=True
            ),
            first_token=first_token_pb2.FirstTokenPolicy.ValueType(first_token),
        )
        if targets_s is None:
            request.prefill_placement = REMOTE
        else:
            request.ttft_target.CopyFrom(duration_from_seconds(targets_s[0]))
            request.tpot_target.CopyFrom(duration_from_seconds(targets_s[1]))
        async for response in self.router.generate(request, REQUEST_S):
            yield response, time.time_ns()

    async def forget(self) -> None:
        """Empties both prefix caches."""
        for child in self.deployment.children:
            if child.spec.service in WORKER_SERVICES:
                await reset_prefix_cache(child.endpoint, 10.0)


@asynccontextmanager
async def ours(
    model: Path, dtype: str, cache_tokens: int, folder: Path, *, both: int = 0, **more: str
) -> AsyncIterator[Ours]:
    """Starts the processes of `headrace up` with settings for small machines. `more` are further ones of workers.

    There are `both` workers of both roles, or one prefill and one decode worker.
    """
    workers = [
        (service, name, value)
        for service in (("worker",) if both else ("prefill", "decode"))
        for name, value in (
            ("dtype", dtype),
            ("num_gpu_blocks_override", str(cache_tokens // BLOCK_TOKENS)),
            *more.items(),
        )
    ]
    topology = Topology(
        model=str(model),
        prefill_count=0 if both else 1,
        decode_count=0 if both else 1,
        worker_count=both,
        port=free_port(),
        http_port=free_port(),
        settings=tuple(workers),
    )
    await asyncio.to_thread(folder.mkdir)
    with (folder / "console.log").open("w") as log:
        async with (
            # Without open signals, asyncio handles Ctrl-C and cancels everything.
            deployed(topology, folder, Console(file=log), Signals()) as deployment,
            open_router(deployment.router) as router,
            open_router_internally(deployment.router_internal) as operator,
        ):
            yield Ours(deployment, router, operator, topology.http_listen)


def engine_arguments(model: Path, dtype: str, cache_tokens: int, **more: Any) -> dict[str, Any]:
    """vLLM's arguments for an engine beside ours. All others are vLLM's defaults."""
    return {
        "model": str(model),
        "dtype": dtype,
        "max_model_len": CONTEXT_TOKENS,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": cache_tokens // BLOCK_TOKENS,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "enforce_eager": True,
        "disable_log_stats": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        **more,
    }


def bytes_of_block(model: Path, dtype: str, block_tokens: int) -> int:
    """KV bytes of a block, from the model's own configuration."""
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained(str(model))
    head_tokens = 2 * read.num_hidden_layers * read.num_key_value_heads * block_tokens
    head_channels: int = (
        getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads
    )
    return int(head_tokens * head_channels * np.dtype(dtype).itemsize)


class Times:
    """Reads the times that the peer's connectors append to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._path.touch()

    def since(self, unix_ns: int) -> dict[str, int]:
        """The last time of each event after `unix_ns`."""
        found: dict[str, int] = {}
        for line in self._path.read_text().splitlines():
            said = json.loads(line)
            if said["unix_ns"] >= unix_ns:
                found[said["event"]] = said["unix_ns"]
        return found


def trace_times(trace: trace_pb2.Trace) -> tuple[float, ...]:
    """Milliseconds of hand-over, transfer, exposed transfer, its lateness and prefill, from the spans of a request."""
    took_ns = {span.name: span.duration.ToNanoseconds() for span in trace.spans}
    ends = {
        span.name: span.start_time.ToNanoseconds() + span.duration.ToNanoseconds()
        for span in trace.spans
    }
    view = read_trace(trace)
    written_ns = view.start_unix_ns + max(
        write.ready_ns for link in view.links for write in link.writes
    )
    computed_ns = ends[schema.SPAN_PREFILL_COMPUTE]
    return (
        (ends[schema.SPAN_DECODE_FIRST_TOKEN] - computed_ns) / 1e6,
        sum(link.moving_ns for link in view.links) / 1e6,
        (ends[schema.SPAN_DECODE_KV_WAIT] - written_ns) / 1e6,
        (ends[schema.SPAN_DECODE_KV_WAIT] - computed_ns) / 1e6,
        took_ns[schema.SPAN_PREFILL_COMPUTE] / 1e6,
    )


@dataclass(frozen=True, slots=True)
class Peer:
    """Two engines paired by vLLM's own MooncakeConnector."""

    prefill: Child
    decode: Child
    times: Times
    bootstrap_port: int


@asynccontextmanager
async def peer(model: Path, dtype: str, cache_tokens: int, folder: Path) -> AsyncIterator[Peer]:
    """Starts both. They may still be loading."""
    await asyncio.to_thread(folder.mkdir)
    port, times = free_port(), folder / "times.jsonl"
    environment = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port), TIMES_VARIABLE: str(times)}
    async with AsyncExitStack() as stack:
        children = []
        for role in ("kv_producer", "kv_consumer"):
            transfer = {
                "kv_connector": "TimedMooncakeConnector",
                "kv_connector_module_path": "bench.support.vllm_peer",
                "kv_role": role,
                "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 2},
            }
            arguments = engine_arguments(model, dtype, cache_tokens, kv_transfer_config=transfer)
            log = folder / f"{role}.log"
            children.append(await stack.enter_async_context(engine(arguments, log, environment)))
        yield Peer(children[0], children[1], Times(times), port)


async def pieces_of(answer: AsyncIterator[Piece]) -> list[Piece]:
    """All pieces of the answer."""
    return [piece async for piece in answer]


class Quiet:
    """Shell commands around measured blocks, for example to take and release a lock of the machine."""

    def __init__(self, before: str, after: str) -> None:
        self._before = before
        self._after = after

    @asynccontextmanager
    async def block(self) -> AsyncIterator[None]:
        """One block. Commands inherit the open files of this process, so that locks on them outlive the commands."""
        await self._run(self._before)
        try:
            yield
        finally:
            await self._run(self._after)

    async def _run(self, command: str) -> None:
        if command:
            process = await asyncio.create_subprocess_shell(command, close_fds=False)
            if await process.wait():
                raise RuntimeError(f"{command} failed")


def alternating(names: list[str], repetition: int) -> list[str]:
    """There and back, starting at the other end each second time."""
    turn = repetition // 2 % len(names)
    turned = names[turn:] + names[:turn]
    return turned if repetition % 2 == 0 else turned[::-1]
