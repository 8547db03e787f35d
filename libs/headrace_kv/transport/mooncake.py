"""Mooncake's TransferEngine, the only module that imports it.

What shapes this code: a return value of -1 means "failed, and may still be writing", for as long as the engine object
lives; an engine can be stuck with a peer for good after a failure; a peer that stands still makes every call to it wait
for MC_TRANSFER_TIMEOUT; many entries in one call are rejected. So sending has an engine of its own, apart from the one
that peers write to: after a failed write it is destroyed, which does end its writing, and a fresh one takes its place.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from headrace_common.errors import ConfigError, TransferFailed
from headrace_kv.block_map import Runs
from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.ranges import MemoryRanges
from headrace_kv.transport.sessions import session_of

_log = logging.getLogger(__name__)

TRANSFER_TIMEOUT_S = 5
"""The least that Mooncake takes; how long a call waits for a peer that stands still."""

# A peer that failed a write is left alone this long: Mooncake itself refuses to reconnect within a second, and
# replacing an engine stops this process for up to a second.
_PEER_REST_S = 1.0
_INFINIBAND = Path("/sys/class/infiniband")
_LIBRARY_PACKAGES = "libibverbs1 libcurl4 libnuma1"


def configure_environment(want: str) -> str:
    """Sets Mooncake's environment variables and returns the protocol that it will use, "rdma" or "tcp".

    Must run before the first engine is made. `want` is "auto", "rdma" or "tcp"; the engine's own protocol argument
    selects nothing. Raises ConfigError when RDMA is asked for without a device.
    """
    if want not in ("auto", "rdma", "tcp"):
        raise ConfigError(f'the transport protocol is "{want}": choose auto, rdma or tcp')
    present = _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())
    if want == "rdma" and not present:
        raise ConfigError(
            "RDMA is asked for but this machine has no RDMA device: choose auto or tcp"
        )
    use = "rdma" if present and want != "tcp" else "tcp"
    for name in ("MC_FORCE_TCP", "MC_FORCE_HCA"):
        os.environ.pop(name, None)
    os.environ["MC_FORCE_HCA" if use == "rdma" else "MC_FORCE_TCP"] = "1"
    os.environ["MC_TRANSFER_TIMEOUT"] = str(TRANSFER_TIMEOUT_S)
    os.environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] = "65535"
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    return use


class MooncakeTransport(KvTransport):
    """KV memory over Mooncake, by RDMA where a device is present and otherwise by TCP.

    Peers authenticate to nobody and reach every registered byte: keep the port range inside a trusted network.
    """

    name = "mooncake"
    # After a failure the engine is gone before `write` raises; what is left are bytes in the peer's own sockets.
    quiet_after_failure_s = 0.5

    def __init__(self, host: str, protocol: str = "auto") -> None:
        self._host = host
        self.protocol = configure_environment(protocol)
        self._engine_type = _load_engine_type()
        self._lock = threading.Lock()
        self._memory = MemoryRanges()
        self._receiving: Any = None
        self._session = ""
        self._sending: Any = None
        self._failed_s: dict[str, float] = {}
        self._closed = False
        self.replaced_count = 0
        _log.info("KV bytes move by Mooncake over %s, from %s", self.protocol, host)

    @property
    def session(self) -> str:
        with self._lock:
            if self._receiving is None:
                self._receiving = self._make_engine()
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

    def write(self, session: str, runs: Runs, timeout_s: float) -> None:
        # A peer that offers several transports names them all.
        session = session_of(self.name, session) or session
        with self._lock:
            self._check_rested(session)
            # Over TCP, Mooncake itself would read any memory.
            if not self._memory.covers(runs.source_addresses, runs.lengths):
                raise TransferFailed("a source address is not registered")
            deadline_s = time.monotonic() + timeout_s
            for batch in runs.batches(self.entry_limit, self.byte_limit):
                if time.monotonic() >= deadline_s:
                    raise TransferFailed(f"writing to {session} took longer than {timeout_s:.1f} s")
                self._write_batch(session, batch)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._receiving = None
            self._sending = None

    def _write_batch(self, session: str, runs: Runs) -> None:
        if self._sending is None:
            self._sending = self._make_engine()
        code = self._sending.batch_transfer_sync_write(
            session,
            runs.source_addresses.tolist(),
            runs.destination_addresses.tolist(),
            runs.lengths.tolist(),
        )
        if code == 0:
            self._failed_s.pop(session, None)
            return
        # Dropping the last reference destroys the engine: only then has it surely stopped reading our memory.
        self._sending = None
        self.replaced_count += 1
        self._failed_s[session] = time.monotonic()
        raise TransferFailed(
            f"Mooncake could not write {len(runs)} runs of {runs.payload_bytes} bytes to {session} (code {code})",
            metadata={"session": session, "code": str(code)},
        )

    def _check_rested(self, session: str) -> None:
        if self._closed:
            raise TransferFailed("the transport is closed")
        now_s = time.monotonic()
        for peer in [
            p for p, failed_s in self._failed_s.items() if now_s - failed_s > _PEER_REST_S
        ]:
            del self._failed_s[peer]
        if session in self._failed_s:
            raise TransferFailed(
                f"a write to {session} failed less than {_PEER_REST_S:.0f} s ago; nothing was written",
                metadata={"session": session},
            )

    def _make_engine(self) -> Any:
        if self._closed:
            raise TransferFailed("the transport is closed")
        engine = self._engine_type()
        code = engine.initialize(self._host, "P2PHANDSHAKE", self.protocol, "")
        if code != 0:
            raise ConfigError(
                f"Mooncake cannot start over {self.protocol} on {self._host} (code {code}): check that the address is "
                "this machine's and that ports from 15000 to 17000 are free"
            )
        for start, end in self._memory.spans:
            _register(engine, start, end - start)
        return engine


def _register(engine: Any, base_address: int, nbytes: int) -> None:
    code = engine.register_memory(base_address, nbytes)
    if code != 0:
        raise ConfigError(
            f"Mooncake cannot register {nbytes} bytes of KV memory (code {code}): for RDMA, raise the limit on locked "
            "memory (ulimit -l unlimited)"
        )


def _load_engine_type() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ModuleNotFoundError as error:
        raise ConfigError(
            "Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f"Mooncake's libraries are missing ({error}): sudo apt-get install {_LIBRARY_PACKAGES}"
        ) from error
    return TransferEngine
