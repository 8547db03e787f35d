"""Mooncake's TransferEngine. The only module that imports it.

Its behaviour shapes this code. A return value of -1 means "failed, and may still be writing", while the engine object
exists. After a failure an engine can be unable to reach a peer for good. A blocking call spins on a core. Many entries
at once are rejected.

So a thread submits and polls the writes (write_worker.py). Sending has an engine of its own, apart from the one that
peers write to. After a failed write the sending engine is destroyed, which ends its writing, and a new one replaces it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.copy_plan import Runs
from headrace_kv.transport.base import (
    KvTransport,
    Thresholds,
    WriteResult,
    failed_future,
    host_of,
    session_of,
)
from headrace_kv.transport.guard import (
    STARTING,
    Address,
    Networks,
    RestrictedPorts,
    addresses_of,
    end_lost_connections,
    filter_program,
    merge_networks,
    networks_of,
    open_listeners,
    resolve_host,
    restrict_listeners,
    restrict_ports,
    set_accept_timeout,
    source_address,
)
from headrace_kv.transport.memory import HOST_MEMORY, Memory, MemoryRanges
from headrace_kv.transport.write_worker import MooncakeEngine, WriteWorker

_log = logging.getLogger(__name__)

TRANSFER_TIMEOUT_S = 5
"""Mooncake's minimum. How long a write waits for a peer that makes no progress."""

# bench/results/transport_costs.md.
_TCP_THRESHOLDS = Thresholds(long_bytes=96 * 1024)
# After a failed write, new writes to the peer fail for this long: Mooncake does not reconnect within a second.
_PEER_REST_S = 1.0
# The destruction of an engine waits for its current accept call.
_ACCEPT_TIMEOUT_S = 0.05
_INFINIBAND = Path("/sys/class/infiniband")
_PEER_MEMORY_MODULE = Path("/sys/module/nvidia_peermem")
# Builds of one module. Installed together they overwrite each other's files.
_BUILDS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine",
)
_LIBRARY_PACKAGES = "libibverbs1 libcurl4 libnuma1"
_FORCED = {"tcp": "MC_FORCE_TCP", "rdma": "MC_FORCE_HCA"}


def configure_environment(want: str) -> str:
    """Sets Mooncake's environment variables and returns the protocol that it will use, "rdma" or "tcp".

    Must run before the first engine is made: the engine's protocol argument has no effect. `want` is "auto", "rdma" or
    "tcp". Raises ConfigError when RDMA is asked for without a device.
    """
    use, variables = protocol_environment(want)
    for name in _FORCED.values():
        os.environ.pop(name, None)
    os.environ.update(variables)
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    return use


def protocol_environment(want: str) -> tuple[str, dict[str, str]]:
    """The protocol that Mooncake will use in a process with these environment variables. See configure_environment."""
    if want not in ("auto", "rdma", "tcp"):
        raise ConfigError(f'the transport protocol is "{want}": choose auto, rdma or tcp')
    present = _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())
    if want == "rdma" and not present:
        raise ConfigError(
            "RDMA is asked for but this machine has no RDMA device: choose auto or tcp"
        )
    use = "rdma" if present and want != "tcp" else "tcp"
    return use, {
        _FORCED[use]: "1",
        "MC_TRANSFER_TIMEOUT": str(TRANSFER_TIMEOUT_S),
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    }


def prepare_device_memory() -> None:
    """Lets Mooncake register a CUDA device's memory. Must run before the first engine that does.

    By default Mooncake needs a kernel module for that. Without the module, a build for CUDA can share the memory as a
    DMA buffer.
    """
    os.environ.setdefault("WITH_NVIDIA_PEERMEM", "1" if _PEER_MEMORY_MODULE.is_dir() else "0")


class MooncakeTransport(KvTransport):
    """KV memory over Mooncake, by RDMA where a device is present and otherwise by TCP.

    Peers are not authenticated and reach every registered byte. Only packets to `host` reach the engines' ports, so on
    a loopback address they are closed to other hosts. Once `admit` has named networks, the packets must also come from
    there. Raises ConfigError for a host that has IPv6 addresses only.
    """

    name = "mooncake"
    # The engine is destroyed before `write` raises. Only bytes in the peer's own sockets can still land.
    quiet_after_failure_s = 0.5
    byte_limit = 16 * 1024 * 1024
    pending_limit = 4

    def __init__(self, host: str, protocol: str = "auto", rdma_devices: Sequence[str] = ()) -> None:
        self._host = host
        self._addresses = resolve_host(host)
        self.protocol = configure_environment(protocol)
        if self.protocol == "tcp":
            self.stages_host_memory = True
            self.thresholds = _TCP_THRESHOLDS
        self._rdma_devices = _device_filter(rdma_devices, self.protocol)
        self._engine_type = _load_engine_type()
        self._lock = threading.Lock()
        self._memory = MemoryRanges()
        self._receiving: Any = None
        self._session = ""
        self._sending: Any = None
        self._worker: WriteWorker | None = None
        self._closed = False
        self._admitted: Networks | None = None
        self._receiving_ports: frozenset[int] = frozenset()
        self._sending_ports: frozenset[int] = frozenset()
        # Over RDMA, a peer connects back to the sending engine for its handshake.
        self._called: frozenset[Address] = frozenset()
        _log.info("KV bytes move by Mooncake over %s, from %s", self.protocol, host)

    @property
    def wire(self) -> str:
        return f"{self.name}/{self.protocol}"

    @property
    def session(self) -> str:
        with self._lock:
            if self._receiving is None:
                self._receiving, self._receiving_ports = self._make_engine(self._admitted)
                self._session = f"{self._host}:{self._receiving.get_rpc_port()}"
            return self._session

    def register(self, base_address: int, nbytes: int) -> None:
        with self._lock:
            if nbytes <= 0:
                raise ConfigError(f"cannot register {nbytes} bytes of KV memory")
            self._memory.add(base_address, nbytes)
            for engine in (self._receiving, self._sending):
                if engine is not None:
                    _register(engine, base_address, nbytes)

    def admit(self, networks: Networks | None) -> None:
        with self._lock:
            # A list that is too long changes nothing.
            filter_program(self._addresses, networks)
            self._admitted = networks
            receiving = restrict_ports(self._receiving_ports, self._addresses, networks)
            sending = self._restrict_sending()
        if receiving.open or sending.open:
            raise ConfigError(
                "the kernel refused to replace a socket filter, so a transfer peer may stay locked out: raise "
                "net.core.optmem_max, or set transfer_peer_networks to fewer networks"
            )

    def source_addresses(self, sessions: Collection[str]) -> frozenset[Address]:
        own = filter(None, (session_of(self.name, session) for session in sessions))
        found = {source_address(host) for host in {host_of(session) for session in own}}
        return frozenset(address for address in found if address is not None)

    def submit(self, session: str, runs: Runs, timeout_s: float) -> Future[WriteResult]:
        # A peer with several transports names them all in its session.
        session = session_of(self.name, session) or session
        if self._closed:
            return failed_future(TransferFailed("the transport is closed"))
        # Over TCP, Mooncake does not check the source address.
        if not self._memory.covers(runs.source_addresses, runs.lengths):
            return failed_future(TransferFailed("a source address is not registered"))
        if self._worker is None:
            self._worker = WriteWorker(
                self._open_sending,
                self._drop_sending,
                self.wire,
                stall_s=TRANSFER_TIMEOUT_S,
                rest_s=_PEER_REST_S,
                on_connect=self._admit_called,
            )
        return self._worker.submit(session, runs, timeout_s)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._worker is not None:
            self._worker.close()
        with self._lock:
            self._receiving = None
            self._receiving_ports = frozenset()

    def _open_sending(self) -> MooncakeEngine:
        with self._lock:
            self._sending, self._sending_ports = self._make_engine(self._sending_sources())
            engine: MooncakeEngine = self._sending
            return engine

    def _drop_sending(self) -> None:
        with self._lock:
            self._sending = None
            self._sending_ports = frozenset()
            self._called = frozenset()

    def _restrict_sending(self) -> RestrictedPorts:
        return restrict_ports(self._sending_ports, self._addresses, self._sending_sources())

    def _sending_sources(self) -> Networks | None:
        """The networks that reach the sending engine. Over TCP no peer connects to it."""
        if self._admitted is None:
            return None
        if self.protocol == "tcp":
            return ()
        return merge_networks((*self._admitted, *networks_of(self._called)))

    def _admit_called(self, session: str) -> None:
        """Lets a peer connect back, where it does, before the sending engine calls it."""
        if self.protocol == "tcp" or self._admitted is None:
            return
        called = addresses_of(host_of(session))
        with self._lock:
            if not called <= self._called:
                self._called |= called
                self._restrict_sending()

    def _make_engine(self, sources: Networks | None) -> tuple[Any, frozenset[int]]:
        """An engine and its restricted ports."""
        if self._closed:
            raise TransferFailed("the transport is closed")
        engine = self._engine_type()
        with STARTING:
            known = open_listeners()
            with without_known_lines():
                code = engine.initialize(
                    self._host, "P2PHANDSHAKE", self.protocol, self._rdma_devices
                )
            ports = restrict_listeners(known, self._addresses, sources)
            end_lost_connections(ports.filtered | ports.open)
        if code != 0:
            raise ConfigError(
                f"Mooncake cannot start over {self.protocol} on {self._host} (code {code}): check that the address is "
                "this machine's and that ports from 15000 to 17000 are free"
            )
        # Memory is registered after the ports are restricted.
        self._report_open_ports(ports, engine.get_rpc_port())
        set_accept_timeout(engine.get_rpc_port(), _ACCEPT_TIMEOUT_S)
        for start, end in self._memory.spans:
            _register(engine, start, end - start)
        return engine, ports.filtered

    def _report_open_ports(self, ports: RestrictedPorts, rpc_port: int) -> None:
        unfiltered = set(ports.open)
        if rpc_port not in ports.filtered:
            unfiltered.add(rpc_port)
        if not unfiltered:
            return
        cause = (
            "the kernel refused a socket filter"
            if self._addresses or self._admitted is not None
            else f"{self._host} is no address of this machine"
        )
        _log.warning(
            "every host that reaches a port of Mooncake can read and write the KV cache, and these ports accept "
            "connections to every address of this machine, because %s: %s. Restrict them by a firewall",
            cause,
            ", ".join(map(str, sorted(unfiltered))),
        )


def open_mooncake(
    host: str, protocol: str, memory: Memory = HOST_MEMORY, rdma_devices: Sequence[str] = ()
) -> MooncakeTransport:
    """A transport for KV in `memory`. Raises ConfigError as MooncakeTransport does."""
    if not memory.on_host and not memory.staged:
        prepare_device_memory()
    return MooncakeTransport(host, protocol, rdma_devices)


def _device_filter(names: Sequence[str], protocol: str) -> str:
    """The adapters as Mooncake takes them: "" for all. Raises ConfigError for those that this host lacks."""
    if not names:
        return ""
    present = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
    missing = [name for name in names if name not in present]
    if missing:
        raise ConfigError(
            f"rdma_devices: this host has no RDMA adapter {', '.join(missing)}, but "
            f"{', '.join(present) or 'none'}: name one of those, or leave rdma_devices empty",
            metadata={"field": "rdma_devices"},
        )
    return ",".join(names) if protocol == "rdma" else ""


def _register(engine: Any, base_address: int, nbytes: int) -> None:
    code = engine.register_memory(base_address, nbytes)
    if code != 0:
        raise ConfigError(
            f"Mooncake cannot register {nbytes} bytes of KV memory (code {code}): for RDMA, raise the limit on locked "
            "memory (ulimit -l unlimited)"
        )


def _load_engine_type() -> Any:
    found = _installed_builds()
    if len(found) > 1:
        raise ConfigError(
            f"Mooncake is installed {len(found)} times, as {' and '.join(found)}, over each other: uninstall "
            "them, then install the one that the vllm-cpu or the vllm-cuda extra names"
        )
    try:
        from mooncake.engine import TransferEngine
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Mooncake is not installed: pip install {_BUILDS[0]}, or {_BUILDS[1]} for KV on CUDA devices. The extras "
            "sim, vllm-cpu and vllm-cuda contain it"
        ) from error
    except ImportError as error:
        cuda = f" Without CUDA's libraries, install {_BUILDS[0]}." if "libcud" in str(error) else ""
        raise ConfigError(
            f"Mooncake's libraries are missing ({error}): sudo apt-get install {_LIBRARY_PACKAGES}{cuda}"
        ) from error
    return TransferEngine


def _installed_builds() -> list[str]:
    found = []
    for name in _BUILDS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.version(name)
            found.append(name)
    return found


_STDERR: Final = 2
_HEALTHY: Final = (
    # An engine searches for its own segment before it has made it. It logs this as an error.
    b"] Local segment descriptor not found",
    # Mooncake logs with glog, and does not initialize it.
    b"WARNING: Logging before InitGoogleLogging() is written to STDERR",
)
"""Ends of lines. Every other line is kept: Mooncake explains failures on stderr only."""


@contextlib.contextmanager
def without_known_lines() -> Iterator[None]:
    """Within this context, what the process writes to stderr is kept in memory. At its end, it is written out.

    Only the known lines are missing then. Calls must not overlap. A crash within loses what was kept.
    """
    try:
        kept = os.memfd_create("headrace-stderr", os.MFD_CLOEXEC)
        original = os.dup(_STDERR)
    except OSError:
        # No memory file, or stderr is closed.
        yield
        return
    try:
        os.dup2(kept, _STDERR)
        try:
            yield
        finally:
            os.dup2(original, _STDERR)
            _write_all(original, wanted_lines(os.pread(kept, os.fstat(kept).st_size, 0)))
    finally:
        os.close(original)
        os.close(kept)


def wanted_lines(content: bytes) -> bytes:
    """The content without the known lines."""
    return b"".join(
        line for line in content.splitlines(keepends=True) if not line.rstrip().endswith(_HEALTHY)
    )


def _write_all(descriptor: int, content: bytes) -> None:
    with contextlib.suppress(OSError):
        while content:
            content = content[os.write(descriptor, content) :]
