"""A registry with thousands of members: joining, renewing, a new watcher, and members that fall silent together.

    python -m bench.registry_members [--members 1000,5000] [--stores memory,etcd] [--leases 500,1]
        [--output DIR]

The members are records without a process. As fleets do, they renew their leases on one stream in messages of up to 500
leases. With --leases 1, each does so on a stream of its own, as a worker with a process of its own does. Four
watchers follow the registry. CPU is that of the registry's process. A relay counts the bytes of one watcher. With store
etcd, /usr/bin/etcd runs beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import grpc.aio
import uvloop

from bench.scale import Relay
from bench.support.processes import cpu_seconds, resident_kib
from bench.support.services import Services
from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.durations import duration_from_seconds
from headrace_common.identity import new_incarnation
from headrace_common.ports import free_port
from headrace_common.registry.view import RegistryView
from headrace_common.rpc.channel import open_channel
from headrace_kv.layout import KvLayout, layout_to_proto

_RENEWALS_PER_TTL: Final = 3
_REGISTRATIONS_AT_ONCE: Final = 64
_WATCHERS: Final = 4
_LIMIT_S: Final = 300.0
_TITLES: Final = (
    *(
        "store",
        "members",
        "leases of a stream",
        "join, s",
        "registry, ms/member",
        "bytes/member and watcher",
        "snapshot, bytes",
    ),
    *("snapshot, s", "idle, % of a core", "idle, bytes/s to a watcher"),
    *(
        "a fifth falls silent: gone after, s",
        "CPU s",
        "registry, MiB",
        "etcd, ms/member",
        "etcd idle, %",
    ),
)
_LAYOUT: Final = layout_to_proto(
    KvLayout.attention(
        model="bench",
        dtype="bfloat16",
        layer_count=32,
        kv_head_count=8,
        block_tokens=16,
        parts={"k": 256, "v": 256},
    )
)


@dataclass(frozen=True, slots=True)
class Site:
    """A registry that is up. `etcd_pid` is 0 without etcd."""

    endpoint: str
    pid: int
    etcd_pid: int
    relay: Relay


@asynccontextmanager
async def served(folder: Path, store: str) -> AsyncIterator[Site]:
    """A registry, behind a relay for one watcher."""
    async with AsyncExitStack() as stack:
        services, etcd_pid, url = Services(stack, folder), 0, "memory"
        if store == "etcd":
            etcd, endpoint = await services.start_etcd()
            url, etcd_pid = f"etcd://{endpoint}", etcd.pid
        port = free_port()
        child = await services.start(
            *("registry", f"--internal-listen=127.0.0.1:{port}", f"--store={url}"),
            "--max-unnamed-members=100000",
            port=port,
        )
        relay = Relay()
        server = await relay.start(f"127.0.0.1:{port}")
        stack.callback(server.close)
        yield Site(f"127.0.0.1:{port}", child.pid, etcd_pid, relay)


class Members:
    """Records in the registry, with their leases."""

    def __init__(
        self,
        prefill: grpc.aio.Channel,
        decode: grpc.aio.Channel,
        leases_per_stream: int,
        ttl_s: float,
    ) -> None:
        """The channels of prefill and decode workers."""
        self._prefill: Any = registry_pb2_grpc.RegistryServiceStub(prefill)
        self._decode: Any = registry_pb2_grpc.RegistryServiceStub(decode)
        self._ttl_s = ttl_s
        self._leases_per_stream = leases_per_stream
        self._joined: list[str] = []
        self._silent: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self, count: int) -> None:
        """Registers `count` members, of which one in five prefills."""
        numbers = iter(range(count))

        async def register() -> None:
            for number in numbers:
                request = _request(number, self._ttl_s)
                prefills = request.member.role == registry_pb2.Member.ROLE_PREFILL
                stub = self._prefill if prefills else self._decode
                response = await stub.Register(request, timeout=_LIMIT_S)
                self._joined.append(response.lease_id)
                left = len(self._joined) - len(self._tasks) * self._leases_per_stream
                if left >= 1:
                    # The first lease of a stream starts it. Later ones follow.
                    first = len(self._tasks) * self._leases_per_stream
                    self._tasks.append(asyncio.create_task(self._renew(first)))

        await asyncio.gather(*(register() for _ in range(_REGISTRATIONS_AT_ONCE)))

    def silence(self, count: int) -> None:
        """Renews the first `count` leases no more."""
        self._silent |= set(self._joined[:count])

    async def close(self) -> None:
        """Renews nothing any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _renew(self, first: int) -> None:
        """Renews the leases of one stream, from the number `first` on."""
        call = self._decode.KeepAlive()
        interval_s = self._ttl_s / _RENEWALS_PER_TTL
        await asyncio.sleep(random.uniform(0.0, interval_s))
        while True:
            begin_s = time.monotonic()
            own = self._joined[first : first + self._leases_per_stream]
            leases = [lease for lease in own if lease not in self._silent]
            if leases:
                await call.write(registry_pb2.KeepAliveRequest(lease_ids=leases))
                response = await call.read()
                if response.ended_lease_ids:
                    raise ValueError(f"{len(response.ended_lease_ids)} leases ended in between")
            await asyncio.sleep(max(0.0, begin_s + interval_s - time.monotonic()))


def _request(number: int, ttl_s: float) -> registry_pb2.RegisterRequest:
    prefills = number % 5 == 0
    role = registry_pb2.Member.ROLE_PREFILL if prefills else registry_pb2.Member.ROLE_DECODE
    member = registry_pb2.Member(
        worker_id=f"{'prefill' if prefills else 'decode'}-{number}",
        incarnation=new_incarnation(),
        role=role,
        endpoint=f"10.1.{number // 250}.{number % 250 + 1}:7053",
        model="bench",
        max_model_len=131_072,
        max_num_seqs=64,
        layout=_LAYOUT,
        start_unix_ns=time.time_ns(),
        transport="mooncake",
    )
    return registry_pb2.RegisterRequest(
        member=member, ttl=duration_from_seconds(ttl_s), sent_unix_ns=time.time_ns()
    )


async def _until_seen(views: list[RegistryView], count: int) -> None:
    async with asyncio.timeout(_LIMIT_S):
        while True:
            if all(len(view.members) == count for view in views):
                return
            await asyncio.sleep(0.02)


async def measure_row(
    site: Site, store: str, count: int, leases_per_stream: int, arguments: argparse.Namespace
) -> str:
    """Joins, idles, lets a new watcher read, and lets a fifth of the members fall silent."""
    async with AsyncExitStack() as stack:

        async def channel(role: Role, endpoint: str = site.endpoint) -> grpc.aio.Channel:
            return await stack.enter_async_context(open_channel(endpoint, Credentials(role=role)))

        views = [RegistryView(await channel(Role.ROUTER, site.relay.endpoint))]
        views += [RegistryView(await channel(Role.ROUTER)) for _ in range(_WATCHERS - 1)]
        for view in views:
            await view.start()
            stack.push_async_callback(view.stop)
        prefill, decode = await channel(Role.PREFILL), await channel(Role.DECODE)
        members = Members(prefill, decode, leases_per_stream, arguments.ttl)
        stack.push_async_callback(members.close)
        used_s, etcd_s = cpu_seconds(site.pid), cpu_seconds(site.etcd_pid)
        bytes_before, begin_s = site.relay.passed_bytes, time.perf_counter()
        await members.join(count)
        await _until_seen(views, count)
        join_s = time.perf_counter() - begin_s
        join_ms = 1e3 * (cpu_seconds(site.pid) - used_s) / count
        etcd_ms = 1e3 * (cpu_seconds(site.etcd_pid) - etcd_s) / count
        join_bytes = (site.relay.passed_bytes - bytes_before) / count
        used_s, etcd_s = cpu_seconds(site.pid), cpu_seconds(site.etcd_pid)
        bytes_before, begin_s = site.relay.passed_bytes, time.perf_counter()
        await asyncio.sleep(arguments.idle)
        took_s = time.perf_counter() - begin_s
        idle_percent = 100 * (cpu_seconds(site.pid) - used_s) / took_s
        etcd_percent = 100 * (cpu_seconds(site.etcd_pid) - etcd_s) / took_s
        idle_bytes = (site.relay.passed_bytes - bytes_before) / took_s
        begin_s = time.perf_counter()
        other = registry_pb2_grpc.RegistryServiceStub(await channel(Role.ROUTER))
        watch: Any = other.Watch(registry_pb2.WatchRequest())
        snapshot = await watch.read()
        watch.cancel()
        snapshot_s = time.perf_counter() - begin_s
        used_s, begin_s = cpu_seconds(site.pid), time.perf_counter()
        members.silence(count // 5)
        await _until_seen(views, count - count // 5)
        gone_s = time.perf_counter() - begin_s
        cells = (
            *(
                store,
                f"{count:,}",
                leases_per_stream,
                f"{join_s:.1f}",
                f"{join_ms:.2f}",
                f"{join_bytes:,.0f}",
            ),
            *(f"{snapshot.ByteSize():,}", f"{snapshot_s:.2f}", f"{idle_percent:.1f}"),
            *(f"{idle_bytes:,.0f}", f"{gone_s:.1f}", f"{cpu_seconds(site.pid) - used_s:.2f}"),
            f"{resident_kib(site.pid) / 1024:.0f}",
            *((f"{etcd_ms:.2f}", f"{etcd_percent:.1f}") if site.etcd_pid else ("-", "-")),
        )
        return f"| {' | '.join(map(str, cells))} |"


async def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the table."""
    lines = [f"| {' | '.join(_TITLES)} |", "|---" * len(_TITLES) + "|"]
    for store in arguments.stores.split(","):
        for count in map(int, arguments.members.split(",")):
            for leases in map(int, arguments.leases.split(",")):
                with TemporaryDirectory() as folder:
                    async with served(Path(folder), store) as site:
                        lines.append(await measure_row(site, store, count, leases, arguments))
                print(lines[-1], flush=True)
    if arguments.output:
        text = _NOTES.format(
            watchers=_WATCHERS,
            ttl_s=arguments.ttl,
            at_once=_REGISTRATIONS_AT_ONCE,
            table="\n".join(lines),
        )
        (Path(arguments.output) / "registry_members.md").write_text(text)


_NOTES: Final = """# A registry with thousands of members

Made by `python -m bench.registry_members`. Members are records without a process, {at_once} of which join at a time.
They renew leases of {ttl_s:g} s. {watchers} watchers follow the registry. All processes
share two CPUs.

{table}

"Join" ends when every watcher has every member. Bytes are those of one watcher, in both directions. Silent members are
gone when every watcher has removed them: their leases end {ttl_s:g} s after their last renewal.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--members", default="1000,5000")
    parser.add_argument("--stores", default="memory,etcd")
    parser.add_argument("--leases", default="500,1", help="renewed on one stream")
    parser.add_argument("--ttl", type=float, default=10.0, help="seconds of a lease")
    parser.add_argument(
        "--idle", type=float, default=10.0, help="seconds to measure without changes"
    )
    parser.add_argument("--output", default="")
    uvloop.run(main(parser.parse_args()))
