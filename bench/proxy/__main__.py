"""Compares the router as a streaming proxy with vllm-router: CPU per request and time added to the first token.

    python -m bench.proxy [--gaps 0,5,20] [--streams 1,32,64,256] [--rounds 3] [--model NAME=FOLDER]
        [--vllm-router PATH] [--no-sim-workers] [--output bench/results/proxy.md] [--json FILE]

Prompts have 200 tokens. Answers have 64, a gap of --gaps milliseconds apart. The workers do nothing else
(bench/proxy/workers.py: one message for each step, or one server-sent event for each token). The load is closed-loop.
CPU is that of the router's process with all its threads, by the kernel's clock of that process. "Direct" calls the
worker itself over the same protocol, in turns with the proxy. Its CPU is what a bare server of this protocol costs,
with a message for each token and nothing else to do. The time that a proxy adds to the first token is the
difference of the medians. vllm-router's columns need its command (pip install vllm-router==0.1.17) and are left out
without it. All processes share the machine, so compare ratios within one run.

With --output, the table of each gap replaces the part "proxy, gap 5 ms" of the page, and so on
(bench/support/page_parts.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import uvloop

from bench.proxy.load import (
    Ask,
    Sample,
    grpc_router,
    grpc_worker,
    http,
    request_count,
    run_streams,
)
from bench.proxy.workers import MODEL, TOKENS
from bench.support.page_parts import check_page, write_parts
from bench.support.processes import cpu_seconds, until_listening
from bench.support.services import Services
from headrace_cli.client import list_members
from headrace_common.ports import free_port

DIRECT: Final = "direct, gRPC"
OURS: Final = "Headrace, gRPC"
OPENAI: Final = "Headrace, OpenAI HTTP"
SIM_DIRECT: Final = "direct, sim worker"
SIM: Final = "Headrace, sim worker"
DIRECT_HTTP: Final = "direct, HTTP"
VLLM: Final = "vllm-router"
_BASELINES: Final = {
    OURS: DIRECT,
    OPENAI: DIRECT_HTTP,
    VLLM: DIRECT_HTTP,
    SIM: SIM_DIRECT,
}
_BARE: Final = {DIRECT: "a bare gRPC server", DIRECT_HTTP: "a bare HTTP server"}
_WARM_REQUESTS: Final = 8

Open = Callable[[int, int], AbstractAsyncContextManager[list[Ask]]]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to send a request, and the process of which the CPU is measured (0 for none)."""

    name: str
    open: Open
    pid: int


@dataclass(slots=True)
class Cell:
    """The measurement of one way, gap and number of streams."""

    first_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    cpu_us_of_rounds: list[float] = field(default_factory=list)
    requests: int = 0
    messages: int = 0

    def add(self, sample: Sample, cpu_s: float) -> None:
        """Adds another round."""
        self.first_s += sample.first_s
        self.cpu_s += cpu_s
        self.cpu_us_of_rounds.append(cpu_s / len(sample.first_s) * 1e6)
        self.requests += len(sample.first_s)
        self.messages += sample.messages

    @property
    def first_ms(self) -> float:
        """Median time to the first token."""
        return statistics.median(self.first_s) * 1e3

    @property
    def cpu_us(self) -> float:
        """CPU microseconds of one request."""
        return self.cpu_s / self.requests * 1e6


Cells = dict[tuple[int, int, str], Cell]


@asynccontextmanager
async def ways(folder: Path, vllm_router: str, model: str) -> AsyncIterator[list[Way]]:
    """Everything started and connected. `model` is the router's, with its tokenizer."""
    door, http_worker, other = (free_port() for _ in range(3))
    async with AsyncExitStack() as stack:
        services = Services(stack, folder, log_level="warning")
        _, here = await services.start_registry()
        direct = await services.run(
            *(sys.executable, "-m", "bench.proxy.workers", here, str(http_worker)),
            name="workers",
            port=http_worker,
        )
        ours, endpoint = await services.start_router(
            *(f"--registry={here}", f"--model={model}"),
            f"--http-listen=127.0.0.1:{door}",
            # All streams come from one host.
        )
        await until_listening(door, ours, folder / "router.log")
        worker = next(m for m in await list_members(here) if m.worker_id == "decode-0")
        found = [
            Way(
                DIRECT,
                lambda n, g: grpc_worker(worker.endpoint, worker.incarnation, n, g),
                direct.pid,
            ),
            Way(OURS, lambda n, g: grpc_router(endpoint, n, g), ours.pid),
            Way(DIRECT_HTTP, lambda n, g: http(http_worker, n, g), direct.pid),
            Way(OPENAI, lambda n, g: http(door, n, g, reads_usage=True), ours.pid),
        ]
        if vllm_router:
            theirs = await services.run(
                *(vllm_router, "--host", "127.0.0.1", "--port", str(other)),
                *("--worker-urls", f"http://127.0.0.1:{http_worker}", "--policy", "round_robin"),
                *("--prometheus-port", str(free_port()), "--log-level", "warning"),
                name="vllm-router",
                port=other,
            )
            found.append(Way(VLLM, lambda n, g: http(other, n, g), theirs.pid))
        await asyncio.sleep(2)
        yield found


@asynccontextmanager
async def sim_ways(folder: Path, gap_ms: int) -> AsyncIterator[list[Way]]:
    """The same with one real decode worker with a simulated engine that takes `gap_ms` per step."""
    decode = free_port()
    model = f"sim:decode_step_s={gap_ms / 1e3}"
    async with AsyncExitStack() as stack:
        services = Services(stack, folder, log_level="warning")
        _, here = await services.start_registry()
        await services.start(
            *("decode", f"--internal-listen=127.0.0.1:{decode}"),
            *(f"--registry={here}", "--worker-id=decode-0", f"--model={model}"),
            *("--served-model=sim", "--max-num-seqs=256", "--num-gpu-blocks-override=4096"),
            port=decode,
        )
        ours, endpoint = await services.start_router(f"--registry={here}", f"--model={MODEL}")
        worker = f"127.0.0.1:{decode}"
        # Time to register, and for the router to receive the registration.
        await asyncio.sleep(3)
        members = await list_members(here)
        incarnation = next(m.incarnation for m in members if m.endpoint == worker)
        yield [
            Way(SIM_DIRECT, lambda n, _: grpc_worker(worker, incarnation, n, 0), 0),
            Way(SIM, lambda n, _: grpc_router(endpoint, n, 0), ours.pid),
        ]


async def measure(found: list[Way], gaps: list[int], streams: list[int], rounds: int) -> Cells:
    """Measures every way in turn, round after round."""
    cells: Cells = {}
    for _ in range(rounds):
        for gap_ms in gaps:
            for count in streams:
                for way in found:
                    async with way.open(count, gap_ms) as asks:
                        await run_streams(asks, min(_WARM_REQUESTS, count))
                        before_s = cpu_seconds(way.pid)
                        sample = await run_streams(asks, request_count(count, gap_ms))
                        cpu_s = cpu_seconds(way.pid) - before_s
                    cells.setdefault((gap_ms, count, way.name), Cell()).add(sample, cpu_s)
    return cells


def ratio(cell: Cell, other: Cell | None) -> str:
    """The median over rounds of the ratio of both CPU times. Empty without the other one, or its rounds."""
    if other is None or len(other.cpu_us_of_rounds) != len(cell.cpu_us_of_rounds):
        return ""
    pairs = zip(cell.cpu_us_of_rounds, other.cpu_us_of_rounds, strict=True)
    return f"{statistics.median(one / two for one, two in pairs):.2f}"


def as_json(cells: Cells) -> str:
    """The same figures for programs."""
    rows = [
        {
            "gap_ms": gap_ms,
            "streams": count,
            "way": name,
            "requests": cell.requests,
            "cpu_us_a_request": [round(value, 1) for value in cell.cpu_us_of_rounds],
            "first_token_ms": round(cell.first_ms, 3),
            "tokens_a_message": round(TOKENS * cell.requests / cell.messages, 2),
        }
        for (gap_ms, count, name), cell in sorted(cells.items(), key=lambda item: item[0][:2])
    ]
    return json.dumps(rows, indent=1) + "\n"


def part_of(gap_ms: int) -> str:
    """The name of the part of a page that has the table of a gap."""
    return f"proxy, gap {gap_ms} ms"


def tables(cells: Cells) -> dict[str, str]:
    """The table of each gap, by the name of its part."""
    gaps = sorted({gap_ms for gap_ms, _, _ in cells})
    return {
        part_of(gap_ms): table({key: cell for key, cell in cells.items() if key[0] == gap_ms})
        for gap_ms in gaps
    }


def table(cells: Cells) -> str:
    """A row for each gap and number of streams of each proxy."""
    titles = (
        *("gap, ms", "streams", "proxy", "CPU µs/request", "CPU µs/token"),
        *("ratio to vllm-router", "first token, ms", "direct, ms", "added, ms", "tokens/message"),
    )
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for (gap_ms, count, name), cell in sorted(cells.items(), key=lambda item: item[0][:2]):
        cpu = (
            f"{cell.cpu_us:.0f} | {cell.cpu_us / TOKENS:.1f} "
            f"| {ratio(cell, cells.get((gap_ms, count, VLLM)))}"
        )
        if name in _BARE:
            lines.append(
                f"| {gap_ms} | {count} | {_BARE[name]} | {cpu} | {cell.first_ms:.2f} | | | 1.0 |"
            )
        if name not in _BASELINES:
            continue
        direct = cells[gap_ms, count, _BASELINES[name]]
        lines.append(
            f"| {gap_ms} | {count} | {name} | {cpu} "
            f"| {cell.first_ms:.2f} | {direct.first_ms:.2f} | {cell.first_ms - direct.first_ms:+.2f} "
            f"| {TOKENS * cell.requests / cell.messages:.1f} |"
        )
    return "\n".join(lines)


_NOTES: Final = """# The router as a streaming proxy

{command}, {cpus} CPUs for everything: load, workers, proxies. Made by `python -m bench.proxy`.

Prompts have about 200 tokens, answers 64. The ratio to vllm-router is the median over the rounds of one run.

The ways. Headrace: one gRPC stream carries the tokens of all requests from the worker, a message for each step. The
router tokenizes the prompt, places it by cached prefixes and load, signs a ticket, admits by tenant, and records spans
for `headrace trace`. It turns each token into text (never part of a character), looks for stop strings, and counts
usage. It gathers the tokens of 2 ms into one message, and of up to 25 ms while its event loop is busy. Clients use
gRPC or OpenAI HTTP. "Sim worker" is a real decode worker with the simulated engine.
vllm-router ({vllm}, round_robin, plain proxying): native code, HTTP on both sides. It forwards the worker's bytes,
which contain text already, with health checks, retries, a circuit breaker and metrics. It does not tokenize, parse the
stream or, in this mode, place by prefix. So it does less for each token than ours. The table compares the price of a
proxy in a deployment, not equal work. The loads differ as well: grpcio's asyncio client costs far more than the bare
HTTP client. With many streams the gRPC columns also queue for CPU in the load and the workers, "direct" included. The
time added to the first token is mostly that queue. With one stream and a gap, the idle wakeups of the process have a
large weight. One write to a socket takes a large part of the cost of a token, in every proxy that sends each token at
once.
"""


async def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the table."""
    vllm_router = shutil.which(arguments.vllm_router) or ""
    gaps = [int(text) for text in arguments.gaps.split(",")]
    streams = [int(text) for text in arguments.streams.split(",")]
    if arguments.output:
        # Before minutes of work.
        check_page(arguments.output, [part_of(gap_ms) for gap_ms in gaps])
    with TemporaryDirectory() as folder:
        async with ways(Path(folder), vllm_router, arguments.model) as found:
            cells = await measure(found, gaps, streams, arguments.rounds)
        for gap_ms in gaps if arguments.sim_workers else ():
            async with sim_ways(Path(folder), gap_ms) as found:
                cells |= await measure(found, [gap_ms], streams, arguments.rounds)
    drawn = table(cells)
    print(drawn)
    if arguments.output:
        notes = _NOTES.format(
            command=f"{arguments.rounds} rounds",
            cpus=os.cpu_count(),
            vllm="0.1.17" if vllm_router else "not installed, so left out",
        )
        write_parts(arguments.output, tables(cells), notes)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(as_json(cells))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--gaps", default="0,5,20")
    parser.add_argument("--streams", default="1,32,64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default=f"{MODEL}=models/SmolLM2-135M-Instruct")
    parser.add_argument("--sim-workers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--vllm-router", default="vllm-router")
    parser.add_argument("--output", type=Path, help="page for the tables")
    parser.add_argument("--json", type=Path, help="file for the figures")
    uvloop.run(main(parser.parse_args()))
