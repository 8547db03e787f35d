"""Parts of the registry's tests: an etcd server, registries, members and descriptors."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_common.access.credentials import TlsFiles
from headrace_common.errors import RegistryUnavailable
from headrace_common.registry.membership import Membership
from headrace_common.registry.view import RegistryView
from headrace_common.rpc.channel import open_channel
from headrace_common.rpc.server import GrpcServer
from headrace_registry.config import RegistryConfig
from headrace_registry.main import SERVICE, open_store
from headrace_registry.service import RegistryServicer, Store
from headrace_registry.store.etcd_store import EtcdStore
from tests.channels import operator_channel
from tests.freezing import freeze, thaw
from tests.ports import free_port
from tests.waiting import until

ETCD = Path("/usr/bin/etcd")


@dataclass
class EtcdServer:
    """An etcd server on loopback. Its data stays in a folder when the process ends.

    With `tls`, it requires certificates of its clients. `cluster` names every member with its peer port. `quota_bytes`
    bounds its data; 0 means etcd's default.
    """

    folder: Path
    name: str = "test"
    tls: TlsFiles | None = None
    cluster: Mapping[str, int] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    peer_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    start_timeout_s: float = 20.0
    quota_bytes: int = 0

    def start(self) -> None:
        self.launch()
        self.wait_reachable()

    def launch(self) -> None:
        """Starts the process. A member of a cluster serves when most of them have started."""
        client = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"
        peer = f"http://127.0.0.1:{self.peer_port}"
        cluster = self.cluster or {self.name: self.peer_port}
        members = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in cluster.items())
        command = [str(ETCD), "--name", self.name, "--data-dir", str(self.folder)]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", members, "--log-level", "error", "--logger", "zap"]
        # Less work for a password than the default of 10.
        command += ["--bcrypt-cost", "4", "--quota-backend-bytes", str(self.quota_bytes)]
        if self.tls is not None:
            command += ["--cert-file", self.tls.tls_certificate_file]
            command += ["--key-file", self.tls.tls_key_file, "--client-cert-auth"]
            command += ["--trusted-ca-file", self.tls.tls_authority_file]
        with (self.folder.parent / "etcd.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def wait_reachable(self) -> None:
        assert self.process is not None
        deadline_s = time.monotonic() + self.start_timeout_s
        while not self._is_reachable():
            assert self.process.poll() is None, "etcd ended during its start"
            assert time.monotonic() < deadline_s, "etcd does not respond"
            time.sleep(0.05)

    def kill(self) -> None:
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
            self.process = None

    def pause(self) -> None:
        assert self.process is not None
        freeze(self.process.pid)

    def resume(self) -> None:
        assert self.process is not None
        thaw(self.process.pid)

    def _is_reachable(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2):
            return True
        return False

    def store(self, prefix: str = "/headrace/v1/", **changes: object) -> EtcdStore:
        """A store in this etcd, not started."""
        config = RegistryConfig.model_validate(
            {"store": f"etcd://127.0.0.1:{self.port}", "store_prefix": prefix, **changes}
        )
        store = open_store(config)
        assert isinstance(store, EtcdStore)
        return store


async def until_renewed(store: Store, lease_id: str) -> None:
    """Returns when etcd serves again. The lease must exist."""

    async def renewed() -> bool:
        try:
            assert await store.keep_alive(lease_id) is not None
        except RegistryUnavailable:
            return False
        return True

    await until(renewed, what="a renewal", interval_s=0.05)


@contextlib.contextmanager
def running_etcd(
    folder: Path, tls: TlsFiles | None = None, quota_bytes: int = 0
) -> Iterator[EtcdServer]:
    server = EtcdServer(folder / "data", tls=tls, quota_bytes=quota_bytes)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def running_cluster(folder: Path, size: int = 3) -> Iterator[list[EtcdServer]]:
    """The members of one etcd cluster."""
    peer_ports = {f"m{number}": free_port() for number in range(size)}
    servers = [
        EtcdServer(folder / name, name=name, peer_port=port, cluster=peer_ports)
        for name, port in peer_ports.items()
    ]
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait_reachable()
        yield servers
    finally:
        for server in servers:
            server.kill()


@dataclass
class Registry:
    """A registry in this process. It can be restarted on the same port."""

    settings: dict[str, object]
    endpoint: str = ""
    store: Store | None = None
    server: GrpcServer | None = None

    async def start(self) -> None:
        listen = self.endpoint or f"127.0.0.1:{free_port()}"
        config = RegistryConfig.model_validate(
            {"insecure": True, **self.settings, "internal_listen": listen}
        )
        self.store = open_store(config)
        await self.store.start()
        self.server = GrpcServer(config, [SERVICE])
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(
            RegistryServicer(
                self.store,
                config.max_members,
                config.max_unnamed_members,
                config.read_prefix_hash_key(),
                max_routers=config.max_routers,
                registrations_per_s=config.max_registrations_per_s,
            ),
            self.server.server,
        )
        self.endpoint = await self.server.start()

    async def stop(self) -> None:
        if self.server is not None and self.store is not None:
            await self.server.server.stop(None)
            await self.store.close()
        self.server = self.store = None


@contextlib.asynccontextmanager
async def running_registry(**settings: object) -> AsyncIterator[Registry]:
    registry = Registry(settings)
    try:
        await registry.start()
        yield registry
    finally:
        await registry.stop()


@contextlib.asynccontextmanager
async def registry_stub(endpoint: str) -> AsyncIterator[registry_pb2_grpc.RegistryServiceAsyncStub]:
    channel: grpc.aio.Channel = operator_channel(endpoint)
    async with channel:
        yield registry_pb2_grpc.RegistryServiceStub(channel)


@contextlib.asynccontextmanager
async def joined(
    endpoint: str,
    member: registry_pb2.Member | None = None,
    ttl_s: float = 10.0,
    descriptor: layout_pb2.KvDescriptor | None = None,
) -> AsyncIterator[Membership]:
    """A started membership, by default of decode-0. It stops at the end of the block."""
    async with open_channel(endpoint) as channel:
        membership = Membership(channel, member or worker(), ttl_s, descriptor)
        try:
            await membership.start(10)
            yield membership
        finally:
            await membership.stop()


@contextlib.asynccontextmanager
async def viewing(
    endpoint: str, on_change: Callable[[RegistryView], None] | None = None, grace_s: float = 10.0
) -> AsyncIterator[RegistryView]:
    """A started view. It stops at the end of the block."""
    async with open_channel(endpoint) as channel:
        view = RegistryView(channel, on_change, grace_s)
        await view.start(10)
        try:
            yield view
        finally:
            await view.stop()


def kv_layout(tensor_parallel_size: int = 1) -> layout_pb2.KvLayout:
    group = layout_pb2.CacheGroup(
        name="attention",
        layers=[0, 1],
        kind=layout_pb2.CacheGroup.KIND_TOKENS,
        head_count=2,
        block_tokens=16,
        parts=[
            layout_pb2.Part(name="kv", dtype="float32", unit_bytes=64, block_format="token_outer")
        ],
    )
    return layout_pb2.KvLayout(
        model="sim", tensor_parallel_size=tensor_parallel_size, stage_starts=[0], groups=[group]
    )


def kv_descriptor(base_address: int = 4096) -> layout_pb2.KvDescriptor:
    region = layout_pb2.Region(
        layer=0, part="kv", block_count=8, block_stride_bytes=2048, unit_bytes=64
    )
    memory = layout_pb2.RankMemory(
        transport="in_memory",
        session="s0",
        base_address=base_address,
        arena_bytes=1 << 20,
        regions=[region],
    )
    return layout_pb2.KvDescriptor(layout=kv_layout(), ranks=[memory])


def worker(
    worker_id: str = "decode-0",
    generation: int = 1,
    role: registry_pb2.Member.Role.ValueType = registry_pb2.Member.ROLE_DECODE,
) -> registry_pb2.Member:
    """The record of one incarnation. A greater generation is newer."""
    return registry_pb2.Member(
        worker_id=worker_id,
        incarnation=f"{generation:016x}",
        role=role,
        endpoint="127.0.0.1:7100",
        model="sim",
        max_model_len=2048,
        layout=kv_layout(),
        max_num_seqs=8,
        start_unix_ns=1_700_000_000_000_000_000 + generation,
    )


def ordered(member: registry_pb2.Member, order: int) -> registry_pb2.Member:
    """The record after a registration that gave this order."""
    record = registry_pb2.Member()
    record.CopyFrom(member)
    record.registration_order = order
    return record


def reference(member: registry_pb2.Member) -> registry_pb2.MemberRef:
    return registry_pb2.MemberRef(worker_id=member.worker_id, incarnation=member.incarnation)
