"""A deployment by its number of simulated workers: start, requests, membership.

    python -m bench.scale [--workers 8,64,250,500,1000] [--requests 300] [--rounds 2] [--idle 6] [--output DIR]

One worker in five prefills. The workers of a role share a process. The smallest deployment stays up beside each other
one, and both take turns under the same load. So "against" is a ratio of interleaved rounds. Every answer is compared
with the model's. All processes reach the registry through a relay that counts bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import grpc.aio
import uvloop

from bench.support.processes import cpu_seconds, resident_kib
from bench.support.services import Services, until_listed
from bench.support.sim_fleet import SERVED_MODEL, SimRequests, start_workers
from headrace.inference.v1 import inference_pb2_grpc

_ANSWER_TOKENS: Final = 16
_PROMPTS: Final = 32
_STREAMS: Final = 16
_JOIN_S: Final = 120.0
_SETTLE_S: Final = 15.0
_TITLES: Final = (
    *("workers", "start, s", "start, CPU s", "requests/s", "router, CPU ms/request", "against"),
    *("workers, CPU ms/request", "membership, bytes/s", "bytes of the start"),
    *("idle router, % of a core", "router, MiB", "registry, MiB"),
)


class Relay:
    """Passes connections on to a port of 127.0.0.1, and counts the bytes of both directions.

    Proofs of callers are for a receiver's port. So the relay has the same port, at another address of the loopback.
    """

    def __init__(self) -> None:
        self.passed_bytes = 0
        self.endpoint = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, target: str) -> asyncio.Server:
        """Listens until the server is closed."""
        host, port = target.rsplit(":", 1)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))

        self.endpoint = f"127.0.0.2:{port}"
        return await asyncio.start_server(serve, "127.0.0.2", int(port))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                self.passed_bytes += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()


@dataclass(frozen=True, slots=True)
class Deployment:
    """One deployment that is up."""

    workers: int
    endpoint: str
    process_ids: dict[str, int]
    relay: Relay
    start_s: float
    start_cpu_s: float
    start_bytes: int


@dataclass(slots=True)
class Load:
    """What rounds of one deployment measured."""

    requests_per_s: list[float] = field(default_factory=list)
    router_ms: list[float] = field(default_factory=list)
    workers_ms: list[float] = field(default_factory=list)


@asynccontextmanager
async def deployed(folder: Path, workers: int) -> AsyncIterator[Deployment]:
    """Starts all processes at once, and yields when the router has found every worker."""
    prefills = max(1, workers // 5)
    relay = Relay()
    begin_s = time.perf_counter()
    async with AsyncExitStack() as stack:
        services = Services(stack, folder, suffix=f"-{workers}")
        registry, registry_endpoint = await services.start_registry()
        server = await relay.start(registry_endpoint)
        stack.callback(server.close)
        here = relay.endpoint
        flags = (f"--registry={here}", f"--model={SERVED_MODEL}")
        router, endpoint = await services.start_router(*flags)
        children = {"registry": registry, "router": router}
        for service, count in (("prefill", prefills), ("decode", workers - prefills)):
            # One worker of a process has no index in its name.
            children[service] = await start_workers(services, service, count, here)
        await until_listed(endpoint, prefills, workers - prefills, _JOIN_S)
        ids = {service: child.pid for service, child in children.items()}
        yield Deployment(
            workers,
            endpoint,
            ids,
            relay,
            time.perf_counter() - begin_s,
            sum(map(cpu_seconds, ids.values())),
            relay.passed_bytes,
        )


async def run_requests(found: Deployment, count: int, load: Load | None) -> None:
    """Sends `count` requests, some at a time. Raises ValueError for a wrong answer."""
    requests = SimRequests(_PROMPTS, _ANSWER_TOKENS)
    numbers = iter(range(count))
    before = {name: cpu_seconds(pid) for name, pid in found.process_ids.items()}
    begin_s = time.perf_counter()
    async with grpc.aio.insecure_channel(found.endpoint) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)

        async def stream() -> None:
            for number in numbers:
                right, _ = await requests.ask(stub, number)
                if not right:
                    raise ValueError(f"the answer of request {number} is wrong")

        await asyncio.gather(*(stream() for _ in range(_STREAMS)))
    if load is None:
        return
    used = {
        name: (cpu_seconds(pid) - before[name]) / count * 1e3
        for name, pid in found.process_ids.items()
    }
    load.requests_per_s.append(count / (time.perf_counter() - begin_s))
    load.router_ms.append(used["router"])
    load.workers_ms.append(used["prefill"] + used["decode"])


async def idle(found: Deployment, seconds: float) -> tuple[float, float]:
    """Bytes a second to and from the registry, and percent of a core of the router, without requests."""
    bytes_before, cpu_before_s = found.relay.passed_bytes, cpu_seconds(found.process_ids["router"])
    begin_s = time.perf_counter()
    await asyncio.sleep(seconds)
    took_s = time.perf_counter() - begin_s
    used_s = cpu_seconds(found.process_ids["router"]) - cpu_before_s
    return (found.relay.passed_bytes - bytes_before) / took_s, 100 * used_s / took_s


async def measure(arguments: argparse.Namespace, folder: Path) -> str:
    """All deployments; returns the table."""
    smallest, *others = map(int, arguments.workers.split(","))
    lines = [
        f"| {' | '.join(_TITLES)} |",
        "|---" * len(_TITLES) + "|",
    ]
    async with deployed(folder, smallest) as base:
        await run_requests(base, arguments.requests // 4, None)
        lines.append(await _row(base, base, arguments))
        print(lines[-1], flush=True)
        for workers in others:
            async with deployed(folder, workers) as found:
                # Streams of workers that joined early are opened again with longer intervals.
                await asyncio.sleep(min(_SETTLE_S, workers / 50))
                await run_requests(found, arguments.requests // 4, None)
                lines.append(await _row(base, found, arguments))
                print(lines[-1], flush=True)
    return "\n".join(lines)


async def _row(base: Deployment, found: Deployment, arguments: argparse.Namespace) -> str:
    own, reference = Load(), Load()
    for number in range(arguments.rounds):
        pair = [(found, own)] if found is base else [(base, reference), (found, own)]
        for deployment, load in pair if number % 2 else reversed(pair):
            await run_requests(deployment, arguments.requests, load)
    reference = own if found is base else reference
    bytes_per_s, idle_percent = await idle(found, arguments.idle)
    router_ms = statistics.median(own.router_ms)
    cells = (
        *(f"{found.workers:,}", f"{found.start_s:.1f}", f"{found.start_cpu_s:.1f}"),
        *(f"{statistics.median(own.requests_per_s):.1f}", f"{router_ms:.2f}"),
        f"{router_ms / statistics.median(reference.router_ms):.2f}x",
        f"{statistics.median(own.workers_ms):.2f}",
        *(f"{bytes_per_s:,.0f}", f"{found.start_bytes:,}", f"{idle_percent:.1f}"),
        f"{resident_kib(found.process_ids['router']) / 1024:.0f}",
        f"{resident_kib(found.process_ids['registry']) / 1024:.0f}",
    )
    return f"| {' | '.join(cells)} |"


async def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the table."""
    with TemporaryDirectory() as folder:
        table = await measure(arguments, Path(folder))
    print(table)
    if arguments.output:
        text = _NOTES.format(
            requests=arguments.requests,
            rounds=arguments.rounds,
            streams=_STREAMS,
            prompt=SimRequests.prompt_tokens,
            answer=_ANSWER_TOKENS,
            table=table,
        )
        (Path(arguments.output) / "scale.md").write_text(text)


_NOTES: Final = """# Deployments of up to 1,000 workers

Made by `python -m bench.scale`: simulated workers (verify=off), of which one in five prefills. The workers of a role
share a process. Requests have {prompt} prompt tokens, {answer} answer tokens and a remote prefill; {streams} run at a
time. Each row has {rounds} rounds of {requests} requests, and every answer was compared with the model's.

{table}

"Start" is the time from the first process to the moment in which the router lists every worker. Its CPU is that of all
processes. Services and load share two CPUs, so that CPU says more than the time. "Against" compares the
router's CPU a request with that of the smallest deployment, which stays up and takes turns with the others.
"Membership" counts all bytes to and from the registry without requests.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--workers", default="8,64,250,500,1000")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--idle", type=float, default=6.0)
    parser.add_argument("--output", default="")
    uvloop.run(main(parser.parse_args()))
