"""CPU that idle decode workers cost a router: their status streams and prefix cache events.

    python -m bench.idle_workers [--workers 0,100,500] [--settle 45] [--seconds 20] [--other CHECKOUT] [--output DIR]

The workers of one process have no engine. Each has a member of the registry, a port, and the services for its status
and its prefix cache. Without requests, the router only follows them. CPU is that of the process with all its threads.
--other measures the router of another checkout too, with its own virtual environment.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import grpc.aio
import uvloop

from bench.support.processes import cpu_seconds
from bench.support.services import Services, until_joined
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.identity import new_incarnation
from headrace_common.registry.membership import Membership
from headrace_common.rpc.channel import keepalive_options, open_channel
from headrace_engine.prefix_events import PrefixEventPublisher
from headrace_engine.worker.status import StatusSignal, WorkerStatusServicer
from headrace_kv.layout.layout import KvLayout, WorkerRef
from headrace_kv.layout.proto import layout_to_proto

_JOIN_S: Final = 100.0
_HERE: Final = "this checkout"
_MEMBER_TTL_S: Final = 60.0
_SERVER_OPTIONS: Final = (
    *keepalive_options(),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)
_LAYOUT: Final = KvLayout.attention(
    model="sim", dtype="float32", layer_count=2, kv_head_count=2, block_tokens=16, parts={"kv": 64}
)


@dataclass(frozen=True, slots=True)
class Row:
    """Percent of a core that a router and its workers' process use without requests."""

    name: str
    workers: int
    router: float
    fleet: float


class _AnyCallersStatus(WorkerStatusServicer):
    def _use_ticket_key(self, public_key: bytes, context: Any) -> None:
        """Without the interceptors of a real worker, the caller is unknown."""


@asynccontextmanager
async def deployed(folder: Path, python: str, workers: int) -> AsyncIterator[tuple[int, int]]:
    """A registry, a router and decode workers. Yields the process ids of the router and of the workers, or 0."""
    async with AsyncExitStack() as stack:
        services = Services(stack, folder, python=python)
        _, here = await services.start_registry()
        control, _ = await services.start_router(f"--registry={here}", "--model=sim")
        if not workers:
            yield control.pid, 0
            return
        fleet = await services.run(
            *(sys.executable, "-m", "bench.idle_workers", "--serve", here, str(workers)),
            name="workers",
        )
        await until_joined(here, 1 + workers, _JOIN_S)
        await _connected(control.pid, workers)
        yield control.pid, fleet.pid


async def serve(registry: str, count: int) -> None:
    """Serves `count` workers until the process is ended."""
    channel = open_channel(registry, Credentials(role=Role.DECODE))
    # All must stay referenced.
    kept = [await _serve_one(channel, number) for number in range(count)]
    print(len(kept), flush=True)
    await asyncio.Event().wait()


async def _serve_one(channel: grpc.aio.Channel, number: int) -> tuple[object, ...]:
    ref = WorkerRef(f"decode-{number}", new_incarnation())
    status = worker_pb2.WatchStatusResponse(
        worker_id=ref.worker_id,
        incarnation=ref.incarnation,
        state=worker_pb2.WatchStatusResponse.STATE_SERVING,
        total_blocks=64,
    )
    events = PrefixEventPublisher(ref, _LAYOUT.block_tokens)
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    servicer = _AnyCallersStatus(lambda: copy.deepcopy(status), events, signal=StatusSignal())
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    member = registry_pb2.Member(
        worker_id=ref.worker_id,
        incarnation=ref.incarnation,
        role=registry_pb2.Member.ROLE_DECODE,
        model="sim",
        endpoint=endpoint,
        client_endpoint=endpoint,
        max_model_len=8_192,
        layout=layout_to_proto(_LAYOUT),
        max_num_seqs=64,
        start_unix_ns=time.time_ns(),
    )
    membership = Membership(channel, member, ttl_s=_MEMBER_TTL_S)
    await membership.start()
    return server, membership, events


async def _connected(pid: int, workers: int) -> None:
    """Waits until the router has as many sockets as workers to follow."""
    async with asyncio.timeout(_JOIN_S):
        while _socket_count(pid) < workers:  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.5)


def _socket_count(pid: int) -> int:
    found = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        # It may have been closed meanwhile.
        with suppress(FileNotFoundError):
            found += str(fd.readlink()).startswith("socket:")
    return found


async def measure(
    name: str, python: str, workers: int, settle_s: float, seconds: float, folder: Path
) -> Row:
    """One deployment, some time after its workers have joined: while they do, streams are opened again."""
    async with deployed(folder, python, workers) as (router, fleet):
        await asyncio.sleep(settle_s)
        before_s = cpu_seconds(router), cpu_seconds(fleet)
        await asyncio.sleep(seconds)
        used_s = cpu_seconds(router) - before_s[0], cpu_seconds(fleet) - before_s[1]
    return Row(name, workers, *(100 * one_s / seconds for one_s in used_s))


def table(rows: list[Row]) -> str:
    """A row for each deployment."""
    lines = [
        "| services | idle decode workers | router, % of a core | all workers, % of a core |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.workers} | {row.router:.1f} | {row.fleet:.1f} |" for row in rows
    ]
    return "\n".join(lines)


async def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the table."""
    pythons = {_HERE: sys.executable}
    if arguments.other:
        pythons = {"the other checkout": f"{arguments.other}/.venv/bin/python", **pythons}
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        for workers in map(int, arguments.workers.split(",")):
            for name, python in pythons.items():
                row = await measure(
                    *(name, python, workers, arguments.settle, arguments.seconds, Path(folder))
                )
                print(table([row]).splitlines()[-1], flush=True)
                rows.append(row)
    if arguments.output:
        text = _NOTES.format(seconds=arguments.seconds, table=table(rows))
        (Path(arguments.output) / "idle_workers.md").write_text(text)


_NOTES: Final = """# Idle workers

Made by `python -m bench.idle_workers`: CPU of {seconds:g} s without requests. All workers are in one process. Each has
a connection of its own, as workers on hosts of their own have. Both CPUs had other load.

{table}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--workers", default="0,100,500")
    parser.add_argument("--settle", type=float, default=45.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--other", default="")
    parser.add_argument("--output", default="")
    parser.add_argument("--serve", nargs=2, metavar=("REGISTRY", "COUNT"), help="Used by itself.")
    given = parser.parse_args()
    uvloop.run(serve(given.serve[0], int(given.serve[1])) if given.serve else main(given))
