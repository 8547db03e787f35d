"""The router beside Dynamo's frontend by the number of simulated workers.

    python -m bench.proxy.dynamo_scale --dynamo PYTHON [--workers 8,64,250,500,1000] [--streams 16] [--rounds 3]
        [--output DIR]

PYTHON and the load are those of bench.proxy.dynamo, with prompts of 200 tokens. One worker in five prefills. Our
workers of a role share a process. At most 100 mockers share one, because a process with 400 of them runs out of ZeroMQ
sockets. Dynamo uses etcd. Both sides are up at the same time and take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import uvloop

from bench.proxy.dynamo import (
    DYNAMO,
    GRPC,
    MODEL_FOLDER,
    OPENAI,
    Cell,
    Chats,
    Side,
    dynamo_commands,
    head,
    measure_once,
    row,
    until_answering,
    write_step_times,
)
from bench.proxy.load import connected, grpc_chats
from bench.support.processes import cpu_seconds, resident_kib, until_listening
from bench.support.services import Services, until_listed
from headrace_common.ports import free_port

_GAP_MS: Final = 5
_PROMPT_TOKENS: Final = 200
_REQUESTS: Final = 96
_READY_S: Final = 180.0
_IDLE_S: Final = 6.0
_SETTLE_S: Final = 10.0
_FIRST_PORT: Final = 10_000
# libzmq allows 1,023 sockets in a process. A mocker opens three, and a frontend three for each group of workers.
_MOCKERS_PER_PROCESS: Final = 100
_EVENT_SOURCES_PER_SOCKET: Final = 16


def bootstrap_ports(count: int) -> list[int]:
    """Free ports that the kernel gives to no other socket: mockers bind them late, after hundreds of others."""
    first, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    with ExitStack() as stack:
        ports: list[int] = []
        for port in range(int(first) - 1, _FIRST_PORT, -1):
            one = stack.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("0.0.0.0", port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise RuntimeError(f"only {len(ports)} ports below {first} are free, not {count}")


def parts(count: int) -> list[int]:
    """The workers of each process of a role."""
    processes = -(-count // _MOCKERS_PER_PROCESS)
    return [count // processes + (number < count % processes) for number in range(processes)]


def _generating(port: int) -> Counter[str]:
    """How many mockers of each component the frontend has found."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
        found = json.load(answer)["instances"]
    return Counter(one["component"] for one in found if one["endpoint"] == "generate")


async def until_found(port: int, wanted: Counter[str]) -> None:
    """Waits until the frontend has found so many mockers of each component."""
    async with asyncio.timeout(_READY_S):
        while True:
            # An overloaded frontend may not answer in time.
            with suppress(OSError):
                if await asyncio.to_thread(_generating, port) == wanted:
                    return
            await asyncio.sleep(1)


@asynccontextmanager
async def dynamo_fleet(
    folder: Path, python: str, prefills: int, decodes: int
) -> AsyncIterator[list[Side]]:
    """Dynamo's frontend, etcd, and processes of mockers for each role.

    They start one after the other, because etcd and the frontend need time to register hundreds of workers.
    """
    async with AsyncExitStack() as stack:
        services = Services(stack, folder)
        _, etcd = await services.start_etcd("--unsafe-no-fsync")
        frontend_command, mocker = dynamo_commands(
            *(folder, python, write_step_times(folder, _GAP_MS), port := free_port(), etcd),
            f"DYN_ROUTER_ZMQ_ENDPOINTS_PER_SUB={_EVENT_SOURCES_PER_SOCKET}",
        )
        frontend = await services.run(*frontend_command, name="frontend", port=port)
        ports = bootstrap_ports(prefills)
        workers, wanted = [], Counter[str]()
        for role, component, count in (
            ("prefill", "prefill", prefills),
            ("decode", "backend", decodes),
        ):
            for number, part in enumerate(parts(count)):
                flags = [f"--num-workers={part}", "--stagger-delay=-1"]
                if role == "prefill":
                    flags += ["--bootstrap-ports", ",".join(map(str, ports[:part]))]
                    del ports[:part]
                name = f"mocker-{role}-{number}"
                workers.append(await services.run(*mocker, role, *flags, name=name))
                wanted[component] += part
                await until_found(port, wanted)
        side = Side(
            *(DYNAMO, lambda n, chats: connected(port, n, lambda: chats.next_post("sim"))),
            *(frontend.pid, tuple(worker.pid for worker in workers)),
        )
        await until_answering(side)
        yield [side]


@asynccontextmanager
async def headrace_fleet(folder: Path, prefills: int, decodes: int) -> AsyncIterator[list[Side]]:
    """Our router and one process of workers for each role."""
    door = free_port()
    async with AsyncExitStack() as stack:
        services = Services(stack, folder)
        _, here = await services.start_registry()
        ours, endpoint = await services.start_router(
            *(f"--http-listen=127.0.0.1:{door}", f"--registry={here}"),
            *(f"--model=sim={MODEL_FOLDER}",),
        )
        await until_listening(door, ours, folder / "router.log")
        model = f"sim:vocabulary=49152,context=8192,decode_step_s={_GAP_MS / 1e3},verify=off"
        workers = [
            await services.start(
                *(role, f"--worker-id={role}", f"--workers-per-process={count}"),
                *(f"--registry={here}", f"--model={model}", "--served-model=sim"),
                "--internal-listen=127.0.0.1:0",
            )
            for role, count in (("prefill", prefills), ("decode", decodes))
        ]
        await until_listed(endpoint, prefills, decodes, _READY_S)
        pids = tuple(worker.pid for worker in workers)
        yield [
            Side(
                *(OPENAI, lambda n, chats: connected(door, n, lambda: chats.next_post("sim"))),
                *(ours.pid, pids),
            ),
            Side(
                *(GRPC, lambda n, chats: grpc_chats(endpoint, n, chats.next_chat)),
                *(ours.pid, pids),
            ),
        ]


async def _idle_percent(side: Side) -> tuple[float, float]:
    """Percent of a core without requests: of the router, and of its workers."""
    pids = (side.router_pid, *side.worker_pids)
    before, begin_s = [cpu_seconds(pid) for pid in pids], time.perf_counter()
    await asyncio.sleep(_IDLE_S)
    took_s = time.perf_counter() - begin_s
    used = [cpu_seconds(pid) - first for pid, first in zip(pids, before, strict=True)]
    return 100 * used[0] / took_s, 100 * sum(used[1:]) / took_s


def new_folder(stack: AsyncExitStack) -> Path:
    """A folder until the stack ends."""
    return Path(stack.enter_context(TemporaryDirectory()))


async def measure(python: str, workers: int, streams: int, rounds: int) -> list[str]:
    """A line for each side."""
    prefills = max(1, workers // 5)
    cells: dict[str, Cell] = {}
    async with AsyncExitStack() as stack:
        sides: list[Side] = []
        for fleet in (
            dynamo_fleet(new_folder(stack), python, prefills, workers - prefills),
            headrace_fleet(new_folder(stack), prefills, workers - prefills),
        ):
            sides += await stack.enter_async_context(fleet)
        await asyncio.sleep(_SETTLE_S)
        chats = Chats(_PROMPT_TOKENS)
        for turn in range(rounds):
            for side in sides if turn % 2 else sides[::-1]:
                cell = cells.setdefault(side.name, Cell())
                await measure_once(side, cell, chats, streams, _REQUESTS)
        lines = []
        for side in sides:
            found = cells[side.name].summary(cells[DYNAMO])
            router_percent, worker_percent = await _idle_percent(side)
            columns = (
                *(workers, side.name, found.router_ms, found.ratio, found.worker_ms),
                *(
                    found.first_p50_ms,
                    found.per_s,
                    f"{router_percent:.1f}",
                    f"{worker_percent:.1f}",
                ),
                f"{resident_kib(side.router_pid) / 1024:.0f}",
                f"{sum(map(resident_kib, side.worker_pids)) / 1024:.0f}",
            )
            lines.append(row(columns))
    return lines


async def main(arguments: argparse.Namespace) -> str:
    """Measures, and returns a table."""
    titles = (
        *("workers", "router", "router, ms/request", "ratio", "workers, ms/request"),
        *("first token p50, ms", "requests/s", "idle router, % of a core", "idle workers, %"),
        *("router, MiB", "workers, MiB"),
    )
    lines = head(titles)
    for workers in map(int, arguments.workers.split(",")):
        lines += await measure(arguments.dynamo, workers, arguments.streams, arguments.rounds)
        print("\n".join(lines[-3:]), flush=True)
    return "\n".join(lines) + "\n"


_NOTES: Final = """# The router beside Dynamo's frontend, by number of workers

Made by `python -m bench.proxy.dynamo_scale`: Dynamo 1.6.1 with its KV router and mockers, with etcd and without NATS,
beside our router with simulated workers (verify=off). One worker in five prefills. The workers of a role share a
process, and at most 100 mockers do.
Chats have 200 prompt tokens and answers of 64 tokens, 5 ms apart. Both sides are up at the same time and take turns on
two CPUs, which the load uses too. Dynamo's mockers move no KV.

{table}
"Ratio" is the router's CPU a request relative to that of Dynamo's frontend, the median of the rounds.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--dynamo", required=True)
    parser.add_argument("--workers", default="8,64,250,500,1000")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    table = uvloop.run(main(options))
    if options.output:
        (Path(options.output) / "dynamo_scale.md").write_text(_NOTES.format(table=table))
