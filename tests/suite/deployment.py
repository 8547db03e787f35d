"""Whole deployments for tests: real processes, the sim engine, Mooncake over TCP on loopback."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2, trace_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.client import RouterClient, worker_status
from headrace_cli.up.deployment import Deployment, Signals, deployed
from headrace_cli.up.supervisor import Child, ChildProcess, Spawn
from headrace_cli.up.topology import ProcessSpec, Topology
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.status import error_from_rpc
from headrace_engine.proto import sampling_from_proto
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import SimSettings
from tests.channels import operator_channel
from tests.fork_server import forking
from tests.freezing import freeze, thaw
from tests.ports import free_port
from tests.waiting import until

VOCABULARY = 32_000
# The router's tokenizer of the sim model has fewer tokens than the model.
PROMPT_VOCABULARY = 512
DEADLINE_S = 20.0
# A process starts in one or two seconds, and on a busy machine in many times that.
START_S = 40.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[sampling_pb2.TokenLogprobs, ...]
    text: str
    trace_id: str
    last: inference_pb2.GenerateResponse


@dataclass(frozen=True, slots=True)
class Suite:
    """A running deployment and the means to use it."""

    deployment: Deployment
    channel: grpc.aio.Channel
    internal_channel: grpc.aio.Channel
    """To the internal listener of the same router."""
    model: SimModel

    @property
    def client(self) -> RouterClient:
        return RouterClient(self.deployment.router, self.channel)

    @property
    def operator(self) -> RouterClient:
        return RouterClient(self.deployment.router_internal, self.internal_channel)

    def child(self, name: str) -> Child:
        """The latest process of that name, including processes that a test added or restarted."""
        children = (*self.deployment.children, *self.deployment.supervisor.children)
        return next(child for child in reversed(children) if child.spec.name == name)

    async def generate(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        placement: inference_pb2.PrefillPlacement.ValueType = (
            inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED
        ),
        request_id: str = "",
        timeout_s: float = DEADLINE_S,
        started: asyncio.Event | None = None,
    ) -> Outcome:
        """Sends a greedy request for exactly `count` tokens. Sets `started` with the first token. Raises
        HeadraceError.
        """
        return await self.ask(greedy(prompt, count, placement, request_id), timeout_s, started)

    async def ask(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float = DEADLINE_S,
        started: asyncio.Event | None = None,
        started_tokens: int = 1,
    ) -> Outcome:
        """Sends a request. Sets `started` with the token of that number. Raises HeadraceError."""
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        responses: list[inference_pb2.GenerateResponse] = []
        count = 0
        try:
            async for response in stub.Generate(request, timeout=timeout_s):
                responses.append(response)
                count += len(response.token_ids)
                if started is not None and count >= started_tokens:
                    started.set()
        except grpc.aio.AioRpcError as rpc_error:
            raise error_from_rpc(rpc_error) from rpc_error
        return Outcome(
            tuple(token_id for response in responses for token_id in response.token_ids),
            tuple(entry for response in responses for entry in response.logprobs),
            "".join(response.text for response in responses),
            next((response.trace_id for response in responses if response.trace_id), ""),
            responses[-1],
        )

    def expected(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        return self.model.expected_tokens(prompt, count)

    def expected_of(self, request: inference_pb2.GenerateRequest) -> tuple[int, ...]:
        sampling = sampling_from_proto(request.sampling, ())
        count = request.sampling.max_tokens
        return self.model.expected_tokens(request.tokens.ids, count, sampling)

    async def trace(self, trace_id: str, wait_s: float = 5.0) -> trace_pb2.Trace:
        return await self.operator.trace(trace_id, wait_s)

    async def status(self, name: str) -> worker_pb2.WatchStatusResponse:
        return await worker_status(self.child(name).endpoint)

    async def until(
        self,
        name: str,
        check: Callable[[worker_pb2.WatchStatusResponse], bool],
        timeout_s: float = 20.0,
    ) -> None:
        """Waits until the status of a worker satisfies `check`."""
        status = worker_pb2.WatchStatusResponse()

        async def satisfied() -> bool:
            nonlocal status
            status = await self.status(name)
            return check(status)

        await until(satisfied, timeout_s, lambda: f"{name}: {status}", 0.02)

    async def wait_empty(self, name: str, timeout_s: float = 10.0) -> None:
        """Waits until a worker holds no request, block, quarantine or transfer."""
        await self.until(name, _holds_nothing, timeout_s)

    async def wait_running(self, *names: str) -> None:
        """Waits until each of these workers runs a request."""
        for name in names:
            await self.until(name, lambda status: status.running_requests > 0)

    async def busier(self, one: str, other: str) -> tuple[str, str]:
        """Of two workers, returns the one with more running requests (at least one) first."""
        running = {name: (await self.status(name)).running_requests for name in (one, other)}
        idle, busy = sorted(running, key=running.__getitem__)
        assert running[busy], "nothing runs any more"
        return busy, idle

    async def wait_descriptors_prefetched(self, timeout_s: float = 20.0) -> None:
        """Waits until every prefill worker has fetched the KV descriptor of every decode worker. The log_level of the
        prefill workers must be debug.
        """
        children = self.deployment.children
        decodes = [c.spec.name for c in children if c.spec.name.startswith("decode-")]
        wanted = [f"prefetched the KV descriptor of {name}@" for name in decodes]
        logs = [c.spec.log_file for c in children if c.spec.name.startswith("prefill-")]

        def prefetched() -> bool:
            return all(text in log.read_text() for log in logs for text in wanted)

        await until(prefetched, timeout_s, lambda: "".join(log.read_text() for log in logs))

    async def begun(
        self,
        requests: Sequence[inference_pb2.GenerateRequest],
        timeout_s: float = 30.0,
        started_tokens: int = 1,
    ) -> list[asyncio.Task[Outcome]]:
        """Starts streams and returns them once each has received that many tokens."""
        starts = [asyncio.Event() for _ in requests]
        tasks = [
            asyncio.create_task(self.ask(request, timeout_s, start, started_tokens))
            for request, start in zip(requests, starts, strict=True)
        ]
        await all_begun(tasks, starts)
        return tasks

    def kill(self, name: str) -> None:
        """Sends SIGKILL. The end of the suite does not expect a good exit status of this process."""
        child = self.child(name)
        self.deployment.supervisor.children.remove(child)
        os.kill(child.process.pid, signal.SIGKILL)

    @contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Stops a process, which keeps its connections, and lets it continue at the end."""
        process_id = self.child(name).process.pid
        freeze(process_id)
        try:
            yield
        finally:
            thaw(process_id)

    async def terminate(self, name: str, timeout_s: float = 30.0) -> int:
        """Sends SIGTERM and returns the exit status."""
        child = self.child(name)
        child.stopping = True
        child.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(child.process.wait(), timeout_s)

    async def add(self, name: str, like: str, *flags: str) -> Child:
        """Starts one more process like `like`, on a free port, with further flags."""
        old = self.child(like).spec
        port_file = old.port_file.with_name(f"{name}.port")
        identity = "--router-id" if old.service == "router" else "--worker-id"
        own = (
            "--internal-listen=127.0.0.1:0",
            f"--port-file={port_file}",
            f"{identity}={name}",
            *flags,
        )
        if old.service == "router":
            own = ("--listen=127.0.0.1:0", *own)
        chosen = {flag.partition("=")[0]: flag for flag in (*old.arguments, *own)}
        spec = ProcessSpec(
            name=name,
            service=old.service,
            arguments=tuple(chosen.values()),
            port_file=port_file,
            log_file=old.log_file.with_name(f"{name}.log"),
            environment=old.environment,
        )
        child = await self.deployment.supervisor.start(spec)
        async with asyncio.timeout(START_S):
            await self.deployment.supervisor.wait_ready([child])
        return child

    @asynccontextmanager
    async def through(self, router: Child) -> AsyncIterator[Suite]:
        """The same deployment through another router."""
        async with (
            open_channel(router.client_endpoint) as channel,
            operator_channel(router.endpoint) as internal_channel,
        ):
            yield replace(self, channel=channel, internal_channel=internal_channel)

    async def wait_joined(self, prefill_count: int, decode_count: int) -> None:
        """Waits until this router has these numbers of workers."""

        async def joined() -> bool:
            models = (await self.operator.listing()).models
            counts = [
                (one.prefill_worker_count, one.decode_worker_count)
                for one in models
                if not one.parent
            ]
            return counts == [(prefill_count, decode_count)]

        await until(joined, START_S, f"{prefill_count} and {decode_count} workers", 0.02)

    async def restart(self, name: str, *extra: str) -> Child:
        """Restarts a process that has ended, on the same address."""
        return await self.restart_killed(self.child(name), *extra)

    async def restart_killed(self, old: Child, *extra: str) -> Child:
        """Restarts a process that was killed, on the same addresses."""
        listens = {"--internal-listen": old.endpoint, "--listen": old.client_endpoint}
        arguments = [text for text in old.spec.arguments if text.partition("=")[0] not in listens]
        arguments += [f"{flag}={address}" for flag, address in listens.items() if address]
        old.spec.port_file.unlink(missing_ok=True)
        spec = ProcessSpec(
            name=old.spec.name,
            service=old.spec.service,
            arguments=(*arguments, *extra),
            port_file=old.spec.port_file,
            log_file=old.spec.log_file.with_suffix(".again.log"),
            environment=old.spec.environment,
        )
        child = await self.deployment.supervisor.start(spec)
        # The process may end instead.
        await until(lambda: spec.port_file.exists() or not child.running, START_S, str(spec))
        assert child.running, spec.log_file.read_text()
        child.endpoint, child.client_endpoint = old.endpoint, old.client_endpoint
        return child


def _holds_nothing(status: worker_pb2.WatchStatusResponse) -> bool:
    return not (
        status.running_requests
        or status.waiting_requests
        or status.reserved_blocks
        or status.quarantined_blocks
        or status.active_transfers
    )


async def all_begun(
    tasks: Sequence[asyncio.Task[Any]], starts: Sequence[asyncio.Event], timeout_s: float = 20.0
) -> None:
    """Waits until every event is set. Raises the error of a task that ends earlier."""
    async with asyncio.timeout(timeout_s):
        for task, start in zip(tasks, starts, strict=True):
            waiting = asyncio.create_task(start.wait())
            try:
                await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if not start.is_set():
                    raise AssertionError(f"it ended before it began: {task.result()}")
            finally:
                waiting.cancel()


@asynccontextmanager
async def suite(
    folder: Path,
    *,
    sim: SimModel | None = None,
    spawning: Callable[[Spawn], Spawn] | None = None,
    **topology: object,
) -> AsyncIterator[Suite]:
    """Starts a deployment, by default with the sim engine. At the end every process must exit with status 0.

    `spawning` may replace the function that starts a process.
    """
    wanted = Topology(**{"engine": "sim", "port": 0, **topology})  # type: ignore[arg-type]
    with (folder / "console.log").open("w") as log, Signals() as signals:
        async with (
            forking(wanted.engine) as spawn,
            nullcontext(spawn if spawning is None else spawning(spawn)) as start,
            deployed(
                wanted, folder, Console(file=log), signals, _on_known_ports(start)
            ) as deployment,
            open_channel(deployment.router) as channel,
            operator_channel(deployment.router_internal) as internal_channel,
        ):
            yield Suite(deployment, channel, internal_channel, sim or default_model())


def _on_known_ports(spawn: Spawn) -> Spawn:
    """Starts processes on ports that the system assigns to no connection.

    While a process is down, the system could assign its port, and the process could not restart on its address.
    """

    async def start(spec: ProcessSpec) -> ChildProcess:
        if any(argument.startswith("--workers-per-process") for argument in spec.arguments):
            # Each of its workers takes any port.
            return await spawn(spec)
        arguments = tuple(
            argument.removesuffix(":0") + f":{free_port()}"
            if argument in ("--internal-listen=127.0.0.1:0", "--listen=127.0.0.1:0")
            else argument
            for argument in spec.arguments
        )
        return await spawn(replace(spec, arguments=arguments))

    return start


def default_model() -> SimModel:
    """The model of the sim engine with default settings."""
    return SimModel(SimSettings(vocabulary=VOCABULARY))


def greedy(
    prompt: Sequence[int],
    count: int,
    placement: inference_pb2.PrefillPlacement.ValueType = inference_pb2.PREFILL_PLACEMENT_UNSPECIFIED,
    request_id: str = "",
    **sampling: Any,
) -> inference_pb2.GenerateRequest:
    """A request for exactly `count` tokens, greedy unless `sampling` changes that."""
    params = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **sampling}
    return inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=prompt),
        sampling=sampling_pb2.SamplingParams(**params),
        prefill_placement=placement,
        request_id=request_id,
    )


def prompt_of(length: int, seed: int) -> list[int]:
    """A prompt that shares no prefix with prompts of other seeds."""
    generator = random.Random(seed)
    return [generator.randrange(PROMPT_VOCABULARY) for _ in range(length)]
