"""The processes of a chaos run by name. Each restarts on its address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import grpc.aio

from headrace_cli.up.supervisor import EXIT_MISCONFIGURED, Child, Spawn, Supervisor, spawn_program
from headrace_cli.up.topology import (
    WORKER_SERVICES,
    ProcessSpec,
    Topology,
    pool_spec,
    registry_spec,
    router_spec,
    worker_specs,
)
from headrace_common.errors import InternalError
from tests.chaos.identities import CredentialKind, Identities
from tests.chaos.kinds import ModelFolder
from tests.chaos.plan import ADAPTER, ChaosPlan
from tests.component.registry.harness import EtcdServer
from tests.ports import free_port

START_TIMEOUT_S = 40.0
KEEP_INTERVAL_S = 0.2
TERMINATE_TIMEOUT_S = 40.0
STOP_GRACE_S = 20.0
ETCD_START_TIMEOUT_S = 20.0
ETCD = "etcd"
POOL = "pool"
# A client connects to a router that is back within 2 s.
RECONNECT_S = 3.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where the services of a run live: their address, and how a process is started."""

    host: str = "127.0.0.1"
    spawn: Spawn = spawn_program


HERE = Place()


def settings(plan: ChaosPlan, model: Path) -> tuple[tuple[str, str, str], ...]:
    """The settings of the services, as Topology.settings. `model` is the folder of a mixed run's model."""
    both = {
        "block_size": str(plan.block_size),
        "num_gpu_blocks_override": str(plan.block_count),
        "drain_grace_s": str(plan.drain_grace_s),
        "lease_ttl_s": str(plan.lease_ttl_s),
        "quarantine_s": str(plan.quarantine_s),
    }
    own = f"layer_s={plan.layer_s}"
    mixed: tuple[tuple[str, str, str], ...] = ()
    if plan.mixed:
        own += f",adapters={ADAPTER}"
        mixed = (("router", "model", f"sim={model}"),)
    # Simulated workers compute sooner than they fetch.
    gain = "0" if plan.conversations else "1"
    if plan.host_gib:
        both["kv_host_gib"] = str(plan.host_gib)
    if plan.disk_gib:
        both["kv_disk_gib"] = str(plan.disk_gib)
    if plan.pool_gib:
        both["kv_fetch_timeout_s"] = str(plan.pool_timeout_s)
    return (
        *((role, name, value) for role in WORKER_SERVICES for name, value in both.items()),
        ("prefill", "model", f"{plan.model},{own},prefill_s_per_token=0.0003"),
        ("decode", "model", f"{plan.model},{own},decode_step_s=0.004"),
        ("worker", "model", f"{plan.model},{own},prefill_s_per_token=0.0003,decode_step_s=0.004"),
        *((role, "prefix_fetch_gain", gain) for role in ("prefill", "worker")),
        ("router", "worker_wait_s", str(plan.worker_wait_s)),
        ("registry", "store_timeout_s", str(plan.store_timeout_s)),
        ("registry", "store_start_timeout_s", str(plan.store_start_timeout_s)),
        *mixed,
    )


@dataclass(slots=True)
class Process:
    """One service, whichever process serves it now. `starts` counts its processes.

    `wanted`: no fault has killed it or asked it to end.
    """

    spec: ProcessSpec
    endpoint: str
    child: Child | None = None
    starts: int = 0
    wanted: bool = False
    serving_since_s: float = 0.0
    frozen: bool = False
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


def _sends(service: str) -> bool:
    return service in ("prefill", "worker")


class Processes:
    """Owns every process. Workers write their observations into the folder `reports`."""

    def __init__(self, plan: ChaosPlan, folder: Path, place: Place = HERE) -> None:
        self.reports = folder / "reports"
        self.etcd = EtcdServer(
            folder / "etcd", start_timeout_s=ETCD_START_TIMEOUT_S * plan.slowness
        )
        self._supervisor = Supervisor(STOP_GRACE_S * plan.slowness, place.spawn)
        self._host = place.host
        self._plan = plan
        self._folder = folder
        self._all: dict[str, Process] = {}
        self.model = ModelFolder(folder / "model")
        self.identities = Identities(CredentialKind(plan.credentials), folder / "credentials")

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(name for name in self._all if name.startswith(WORKER_SERVICES))

    @property
    def hostile(self) -> frozenset[str]:
        """The workers that lie."""
        prefills = len(self._plan.prefill_tensor_parallel)
        decodes = len(self._plan.decode_tensor_parallel)
        names = (f"prefill-{prefills - 1}", f"decode-{decodes - 1}")
        return frozenset(names if self._plan.hostile else ())

    @property
    def stores(self) -> tuple[str, ...]:
        """The store of the remote pool, if there is one."""
        return tuple(name for name in self._all if name == POOL)

    @property
    def routers(self) -> tuple[str, ...]:
        return tuple(name for name in self._all if name.startswith("router"))

    def endpoint(self, name: str) -> str:
        return self._all[name].endpoint

    def internal_endpoint(self, name: str) -> str:
        """Where operators call a router."""
        arguments = dict(one.partition("=")[::2] for one in self._all[name].spec.arguments)
        return arguments["--internal-listen"]

    def client_channels(self) -> list[grpc.aio.Channel]:
        """A channel of a client to each router."""
        return [self.identities.client_channel(self.endpoint(name)) for name in self.routers]

    def process_ids(self) -> dict[str, int]:
        """The running processes of all services."""
        return {
            name: one.child.process.pid
            for name, one in self._all.items()
            if one.child is not None and one.child.running
        }

    def running(self, name: str) -> bool:
        """Whether the process runs and is not frozen."""
        if name == ETCD:
            return self.etcd.process is not None
        one = self._all[name]
        return one.child is not None and one.child.running and not one.frozen

    def killed(self, name: str) -> bool:
        """Whether the process has ended by SIGKILL."""
        child = self._all[name].child
        return child is not None and child.process.returncode == -signal.SIGKILL

    def serving(self, name: str) -> bool:
        """Whether the process runs, is not frozen, does not drain, and has served for so long that clients know."""
        one = self._all[name]
        known_s = one.serving_since_s + RECONNECT_S * self._plan.slowness
        return self.running(name) and one.wanted and time.monotonic() >= known_s

    async def start(self) -> None:
        """Starts all. Raises as Supervisor.check does."""
        self.reports.mkdir(parents=True)
        if self._plan.mixed:
            self.model.write()
        await self._supervisor.open()
        await asyncio.to_thread(self.etcd.start)
        topology = Topology(
            engine="sim",
            prefill_count=len(self._plan.prefill_tensor_parallel),
            decode_count=len(self._plan.decode_tensor_parallel),
            worker_count=len(self._plan.worker_tensor_parallel),
            store=f"etcd://127.0.0.1:{self.etcd.port}",
            settings=settings(self._plan, self.model.path),
            pool_gib=self._plan.pool_gib,
        )
        if topology.pool_gib:
            self._add(pool_spec(topology, self._folder, f"{self._host}:0"))
        self._add(registry_spec(topology, self._folder))
        registry = self.endpoint("registry")
        for number in range(self._plan.routers):
            spec = router_spec(topology, self._folder, registry)
            name = f"router-{number}"
            self._add(_renamed(spec, name, f"--router-id={name}"))
        ranks = (
            *self._plan.prefill_tensor_parallel,
            *self._plan.decode_tensor_parallel,
            *self._plan.worker_tensor_parallel,
        )
        pool = self.endpoint(POOL) if topology.pool_gib else ""
        workers = worker_specs(topology, self._folder, registry, pool)
        for spec, count in zip(workers, ranks, strict=True):
            self._add(self._wired(spec, count))
        # Others connect to these when they start.
        first = [name for name in (POOL, "registry") if name in self._all]
        for name in first:
            await self.begin(name)
        await asyncio.gather(*(self.begin(name) for name in self._all if name not in first))

    def _add(self, spec: ProcessSpec) -> None:
        listens = {
            flag: f"{self._host}:{free_port()}"
            for flag in (text.partition("=")[0] for text in spec.arguments)
            if flag in ("--listen", "--internal-listen")
        }
        fixed = {flag: f"{flag}={address}" for flag, address in listens.items()}
        arguments = tuple(fixed.get(text.partition("=")[0], text) for text in spec.arguments)
        # That of a router is for clients.
        endpoint = listens.get("--listen") or listens["--internal-listen"]
        # The store checks no caller.
        identity = () if spec.name == POOL else self.identities.flags(spec.service, spec.name)
        self._all[spec.name] = Process(replace(spec, arguments=(*arguments, *identity)), endpoint)

    def _wired(self, spec: ProcessSpec, ranks: int) -> ProcessSpec:
        """A worker with faults in its messages."""
        _, _, _, *flags = spec.arguments
        flags = [text for text in flags if not text.startswith("--tensor-parallel-size=")]
        wire = replace(self._plan.wire, hostile=spec.name in self.hostile)
        return replace(
            spec,
            arguments=(
                sys.executable,
                "-m",
                "tests.chaos.worker",
                spec.service,
                *flags,
                f"--tensor-parallel-size={ranks}",
            ),
            environment={
                **spec.environment,
                "HEADRACE_CHAOS": json.dumps(asdict(wire)),
                "HEADRACE_CHAOS_REPORTS": str(self.reports),
            },
        )

    async def begin(self, name: str) -> None:
        """Starts a process that does not run, and returns once it serves.

        A process that ends at its start, such as a registry without etcd, is started again, as a supervisor would.
        """
        if name == ETCD:
            if self.etcd.process is None:
                await asyncio.to_thread(self.etcd.start)
            return
        one = self._all[name]
        log = self._folder / f"{name}.{one.starts}.log"
        try:
            async with asyncio.timeout(START_TIMEOUT_S * self._plan.slowness), one.starting:
                while True:
                    if one.child is None or not one.child.running:
                        log = self._folder / f"{name}.{one.starts}.log"
                        one.starts += 1
                        one.child = await self._supervisor.start(replace(one.spec, log_file=log))
                    elif one.spec.port_file.exists():
                        one.wanted, one.serving_since_s = True, time.monotonic()
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise InternalError(f"{name} does not serve; its log is {log}") from None

    async def keep(self, ended: Counter[str], crashes: list[str]) -> None:
        """Restarts services that end by themselves, as an operator's supervisor would, until cancelled.

        A service may end when it finds no registry at its start, and a prefill worker while it is frozen, by its kill
        timer. Both are counted. Any other end is a crash.
        """
        while True:
            for name, one in self._all.items():
                if one.wanted and one.child is not None and not one.child.running:
                    status = one.child.process.returncode
                    if status == EXIT_MISCONFIGURED:
                        ended[f"{one.spec.service} found no registry"] += 1
                    elif status == -signal.SIGKILL and one.frozen and _sends(one.spec.service):
                        ended["sender ended within a write"] += 1
                        one.frozen = False
                    elif name in self.hostile:
                        ended["worker that lies ended"] += 1
                    else:
                        crashes.append(f"{name} ended by itself with status {status}")
                    await self.begin(name)
            await asyncio.sleep(KEEP_INTERVAL_S * self._plan.slowness)

    async def kill(self, name: str) -> None:
        """Sends SIGKILL and returns when the process has ended."""
        if name == ETCD:
            self.etcd.kill()
            return
        self._all[name].wanted = False
        self._signal(name, signal.SIGKILL)
        child = self._all[name].child
        assert child is not None
        await child.process.wait()

    def freeze(self, name: str) -> None:
        if name == ETCD:
            self.etcd.pause()
            return
        self._signal(name, signal.SIGSTOP)
        self._all[name].frozen = True

    def thaw(self, name: str) -> None:
        if name == ETCD:
            self.etcd.resume()
            return
        self._signal(name, signal.SIGCONT)
        self._all[name].frozen = False

    async def terminate(self, name: str) -> int:
        """Sends SIGTERM and returns the exit status."""
        child = self._all[name].child
        assert child is not None
        child.mark_stopping()
        self._all[name].wanted = False
        self._signal(name, signal.SIGTERM)
        return await self._ended(child)

    async def settle(self, name: str) -> None:
        """Waits for a process that a fault had asked to end when the run ended."""
        child = self._all[name].child if name in self._all else None
        if child is not None and child.stopping:
            await self._ended(child)

    async def _ended(self, child: Child) -> int:
        timeout_s = TERMINATE_TIMEOUT_S * self._plan.slowness
        return await asyncio.wait_for(child.process.wait(), timeout_s)

    def _signal(self, name: str, number: signal.Signals) -> None:
        child = self._all[name].child
        assert child is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.process.pid, number)
        if name == POOL and number in (signal.SIGSTOP, signal.SIGCONT):
            # The virtual machines of tests/rdma have neither a pool nor this.
            import psutil

            # The master of the store is a process of its own, which ends with the other one.
            with contextlib.suppress(psutil.NoSuchProcess):
                for master in psutil.Process(child.process.pid).children():
                    master.send_signal(number)

    async def stop(self) -> None:
        """Ends everything."""
        for name, one in self._all.items():
            if one.frozen:
                self.thaw(name)
        await self._supervisor.stop()
        self.etcd.kill()


def _renamed(spec: ProcessSpec, name: str, *flags: str) -> ProcessSpec:
    port_file = spec.port_file.with_name(f"{name}.port")
    own = (*flags, f"--port-file={port_file}")
    chosen = {text.partition("=")[0]: text for text in (*spec.arguments[3:], *own)}
    return replace(
        spec,
        name=name,
        arguments=(*spec.arguments[:3], *chosen.values()),
        port_file=port_file,
    )
