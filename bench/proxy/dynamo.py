"""Compares the router with Dynamo's frontend: both with a prefill and two decode workers that simulate an engine.

    python -m bench.proxy.dynamo --dynamo PYTHON [--gaps 5] [--prompts 200,4000] [--streams 1,32,64] [--rounds 3]
        [--sim verify=off] [--output FILE]

PYTHON has ai-dynamo and ai-dynamo-runtime 1.6.1, with uvloop and transformers. Its frontend runs with its KV router,
and its mocker workers. Both sides serve the same model's tokenizer. A chat has one of four system prompts of three
quarters of its length, and an ending of its own. Answers have 64 tokens. The load is closed-loop, and both sides take
turns within each round. CPU is that of the processes by the kernel's clock of each. Dynamo's mockers move no KV. Ours
move it, and without `verify=off` they check every byte.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import grpc.aio
import numpy as np
import uvloop

from bench.proxy.load import PROMPT, Ask, connected, grpc_chats, post, run_streams
from bench.proxy.workers import TOKENS
from bench.support.processes import cpu_seconds, until_listening
from bench.support.services import Services, until_joined
from headrace_common.ports import free_port

DYNAMO: Final = "Dynamo's frontend"
OPENAI: Final = "Headrace, OpenAI HTTP"
GRPC: Final = "Headrace, gRPC"
MODEL_FOLDER: Final = "models/SmolLM2-135M-Instruct"
_WORDS: Final = PROMPT.split()[:10]
_READY_S: Final = 60.0


class Chats:
    """Chats of about `tokens` tokens: a system prompt that others share, and an ending that none shares."""

    def __init__(self, tokens: int) -> None:
        self._system = " ".join(itertools.islice(itertools.cycle(_WORDS), tokens * 3 // 4 - 15))
        self._ending = " ".join(itertools.islice(itertools.cycle(_WORDS), tokens // 4 - 20))
        self._numbers = itertools.count()

    def next_chat(self) -> tuple[str, str]:
        """The content of the system's message, and of the user's."""
        number = next(self._numbers)
        return f"Rule {number % 4}. {self._system}", f"{time.time_ns()} {number} {self._ending}"

    def next_post(self, model: str) -> bytes:
        """The same as an OpenAI request."""
        system, user = self.next_chat()
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": user},
        ]
        content = {
            "model": model,
            "messages": messages,
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        return post("/v1/chat/completions", content)


@dataclass(frozen=True, slots=True)
class Side:
    """One way to a router, with the processes of the router and of its workers."""

    name: str
    open: Callable[[int, Chats], AbstractAsyncContextManager[list[Ask]]]
    router_pid: int
    worker_pids: tuple[int, ...]


@dataclass(slots=True)
class Cell:
    """The rounds of one side, length of prompts and number of streams."""

    router_ms: list[float] = field(default_factory=list)
    worker_ms: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    per_s: list[float] = field(default_factory=list)

    def summary(self, theirs: Cell) -> Summary:
        """Medians. `theirs` are the rounds of Dynamo's frontend that took turns with these."""
        ratios = (a / b for a, b in zip(self.router_ms, theirs.router_ms, strict=True))
        first_ms = sorted(1e3 * value for value in self.first_s)
        return Summary(
            f"{statistics.median(self.router_ms):.2f}",
            f"{statistics.median(ratios):.2f}",
            f"{statistics.median(self.worker_ms):.1f}",
            f"{statistics.median(first_ms):.0f}",
            f"{first_ms[int(0.99 * len(first_ms))]:.0f}",
            f"{statistics.median(self.per_s):.0f}",
        )


class Summary(NamedTuple):
    """A cell as text: CPU of the router, relative to Dynamo's frontend, of the workers; first token; rate."""

    router_ms: str
    ratio: str
    worker_ms: str
    first_p50_ms: str
    first_p99_ms: str
    per_s: str


def row(columns: Iterable[object]) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(str, columns))} |"


def head(titles: Sequence[str]) -> list[str]:
    """The first lines of a table."""
    return [row(titles), "|---" * len(titles) + "|"]


async def until_answering(side: Side) -> None:
    """Waits for an answer. Workers register after their processes have started."""
    async with asyncio.timeout(_READY_S):
        while True:
            try:
                async with side.open(1, Chats(200)) as asks, asyncio.timeout(5):
                    await run_streams(asks, 1)
                    return
            except (OSError, ValueError, TimeoutError, grpc.aio.AioRpcError):
                await asyncio.sleep(0.2)


def write_step_times(folder: Path, gap_ms: int) -> Path:
    """A profile for mockers, with constant step times."""
    times = folder / "step_times.npz"
    np.savez(
        times,
        prefill_isl=np.array([1.0, 1e5]),
        prefill_ttft_ms=np.array([0.01, 0.01]),
        decode_active_kv_tokens=np.array([0.0, 1e7]),
        decode_context_length=np.array([1.0, 1e5]),
        decode_itl=np.full((2, 2), float(gap_ms) or 0.01),
    )
    return times


def dynamo_commands(
    folder: Path, python: str, times: Path, port: int, etcd: str = "", *variables: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The frontend's command, without NATS, and that of mockers, which lacks the role.

    They find each other by files, or in `etcd` if an endpoint is given. `variables` are for their environment.
    """
    backend, where = "etcd", f"ETCD_ENDPOINTS=http://{etcd}"
    if not etcd:
        backend, where = "file", f"DYN_FILE_KV={folder / 'store'}"
        (folder / "store").mkdir()
    planes = ("--discovery-backend", backend, "--request-plane", "tcp", "--event-plane", "zmq")
    prefix = ("env", where, *variables, "HF_HUB_OFFLINE=1", "DYN_LOG=warn", python, "-m")
    http = ("--http-host", "127.0.0.1", "--http-port", str(port))
    frontend = (*prefix, "dynamo.frontend", *http, "--router-mode", "kv", *planes)
    mocker = (
        *(*prefix, "dynamo.mocker", "--model-path", Path.cwd() / MODEL_FOLDER),
        *("--model-name", "sim", *planes, "--block-size", 32, "--planner-profile-data", times),
        *("--kv-transfer-bandwidth", 0, "--max-num-seqs", 512),
        *("--num-gpu-blocks-override", 16_384, "--disaggregation-mode"),
    )
    return frontend, tuple(map(str, mocker))


@asynccontextmanager
async def dynamo(folder: Path, python: str, gap_ms: int) -> AsyncIterator[list[Side]]:
    """Dynamo's frontend with its KV router and three mocker workers, without etcd and NATS."""
    port = free_port()
    frontend_command, mocker = dynamo_commands(
        folder, python, write_step_times(folder, gap_ms), port
    )
    async with AsyncExitStack() as stack:
        services = Services(stack, folder)
        frontend = await services.run(*frontend_command, name="frontend", port=port)
        workers = [
            await services.run(*mocker, *role, name=f"mocker{number}")
            for number, role in enumerate(
                (("prefill", "--bootstrap-ports", str(free_port())), ("decode",), ("decode",))
            )
        ]
        pids = tuple(worker.pid for worker in workers)
        side = Side(
            *(DYNAMO, lambda n, chats: connected(port, n, lambda: chats.next_post("sim"))),
            *(frontend.pid, pids),
        )
        await until_answering(side)
        yield [side]


@asynccontextmanager
async def headrace(folder: Path, sim: str, gap_ms: int) -> AsyncIterator[list[Side]]:
    """Our router with three workers with the simulated engine. `sim` is added to the engine's settings."""
    door = free_port()
    model = f"sim:vocabulary=49152,context=8192,decode_step_s={gap_ms / 1e3}"
    engine = (
        f"--model={model}{',' if sim else ''}{sim}",
        *("--served-model=sim", "--max-num-seqs=256", "--num-gpu-blocks-override=16384"),
        *("--max-num-batched-tokens=8192", "--internal-listen=127.0.0.1:0"),
    )
    async with AsyncExitStack() as stack:
        services = Services(stack, folder, log_level="warning")
        _, here = await services.start_registry()
        ours, endpoint = await services.start_router(
            *(
                f"--http-listen=127.0.0.1:{door}",
                f"--registry={here}",
                f"--model=sim={MODEL_FOLDER}",
            ),
            # All streams come from one host.
        )
        await until_listening(door, ours, folder / "router.log")
        workers = [
            await services.start(
                *(name.partition("-")[0], f"--worker-id={name}", f"--registry={here}", *engine),
                name=name,
            )
            for name in ("prefill-0", "decode-0", "decode-1")
        ]
        await until_joined(here, 1 + len(workers), _READY_S)
        pids = tuple(worker.pid for worker in workers)
        sides = [
            Side(
                *(OPENAI, lambda n, chats: connected(door, n, lambda: chats.next_post("sim"))),
                *(ours.pid, pids),
            ),
            Side(
                *(GRPC, lambda n, chats: grpc_chats(endpoint, n, chats.next_chat)),
                *(ours.pid, pids),
            ),
        ]
        for side in sides:
            await until_answering(side)
        yield sides


async def measure_once(side: Side, cell: Cell, chats: Chats, streams: int, requests: int) -> None:
    """Adds a round to a cell."""
    async with side.open(streams, chats) as asks:
        await run_streams(asks, max(4, streams))
        router_s = cpu_seconds(side.router_pid)
        worker_s = sum(map(cpu_seconds, side.worker_pids))
        begin_s = time.perf_counter()
        sample = await run_streams(asks, requests)
        wall_s = time.perf_counter() - begin_s
        router_s = cpu_seconds(side.router_pid) - router_s
        worker_s = sum(map(cpu_seconds, side.worker_pids)) - worker_s
    cell.router_ms.append(1e3 * router_s / requests)
    cell.worker_ms.append(1e3 * worker_s / requests)
    cell.first_s += sample.first_s
    cell.per_s.append(requests / wall_s)


def table(gap_ms: int, cells: dict[tuple[int, int, str], Cell]) -> list[str]:
    """A line for each cell."""
    return [
        row((gap_ms, tokens, streams, name, *cell.summary(cells[tokens, streams, DYNAMO])))
        for (tokens, streams, name), cell in cells.items()
    ]


async def main(arguments: argparse.Namespace) -> str:
    """Measures, and returns a table."""
    titles = (
        *("gap, ms", "prompt", "streams", "router", "router, ms/request", "ratio"),
        *("workers, ms/request", "first token p50, ms", "p99, ms", "requests/s"),
    )
    lines = head(titles)
    for gap_ms in map(int, arguments.gaps.split(",")):
        cells: dict[tuple[int, int, str], Cell] = {}
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            sides = await stack.enter_async_context(dynamo(folder, arguments.dynamo, gap_ms))
            sides += await stack.enter_async_context(headrace(folder, arguments.sim, gap_ms))
            for turn in range(arguments.rounds):
                for tokens in map(int, arguments.prompts.split(",")):
                    chats = Chats(tokens)
                    for streams in map(int, arguments.streams.split(",")):
                        requests = 20 if streams == 1 else 3 * streams
                        for side in sides if turn % 2 else sides[::-1]:
                            cell = cells.setdefault((tokens, streams, side.name), Cell())
                            await measure_once(side, cell, chats, streams, requests)
        lines += table(gap_ms, cells)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return "\n".join(lines) + f"\n\nLoad of the machine at the end: {load}.\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--dynamo", required=True)
    parser.add_argument("--gaps", default="5")
    parser.add_argument("--prompts", default="200,4000")
    parser.add_argument("--streams", default="1,32,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sim", default="")
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    drawn = uvloop.run(main(options))
    print(drawn)
    if options.output:
        Path(options.output).write_text(drawn)
