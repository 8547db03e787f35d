"""A store for the workers of this node: `python -m headrace_kv.tiers.pool_server --listen 127.0.0.1:7070`.

It has a master of Mooncake Store and the memory of all blocks. The store authenticates no client. So it serves loopback
addresses only, and no packet of another node reaches a port of it.
"""

from __future__ import annotations

import argparse
import ctypes
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib import resources
from pathlib import Path
from typing import Final

from headrace_common.errors import ConfigError, HeadraceError, TransferFailed
from headrace_common.ports import free_port, split_host_port
from headrace_common.rpc.server import write_port_file
from headrace_kv.tiers.pool_process import MooncakeStore, SharedArena
from headrace_kv.transport.guard import parse_networks
from headrace_kv.transport.mooncake import configure_environment

_START_LIMIT_S: Final = 20.0
_POLL_S: Final = 0.02
_GIB: Final = 1 << 30
_EXIT_MISCONFIGURED: Final = 2
_PARENT_DEATH_SIGNAL: Final = 1
_LEASE_MS: Final = 5_000
"""How long a block stays after it was found, so that it can be read."""
_CLIENT_TTL_S: Final = 10
_THREADS: Final = 4


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The options. Exits with status 2 for wrong ones."""
    parser = argparse.ArgumentParser(prog="headrace_kv.tiers.pool_server", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0", help="loopback address of the master")
    parser.add_argument("--memory-gib", type=float, default=1.0, help="memory for blocks, in GiB")
    parser.add_argument("--port-file", default="", help="file that gets the address once it serves")
    return parser.parse_args(arguments)


class StoreServer:
    """The master, a process of its own, and the memory, in this process."""

    def __init__(self, listen: str, memory_gib: float) -> None:
        """Raises ConfigError for an address that other nodes reach, and TransferFailed when it does not start."""
        try:
            self._ip, port = split_host_port(listen)
        except ValueError as error:
            raise ConfigError(f"listen: {error}", metadata={"field": "listen"}) from None
        _require_loopback(self._ip)
        if memory_gib <= 0:
            raise ConfigError(f"memory_gib is {memory_gib:g}: take more than 0")
        configure_environment("tcp")
        self._port = port or free_port(self._ip)
        self.address = f"{self._ip}:{self._port}"
        self._memory = SharedArena(round(memory_gib * _GIB), "memory_gib")
        self._master = _start_master(self._ip, self._port)
        try:
            self._wait_for_master()
            self._store = MooncakeStore(
                self._ip, self.address, protocol="tcp", sources=parse_networks(["127.0.0.0/8"])
            )
            self._store.offer(self._memory)
        except HeadraceError:
            self.close()
            raise
        # The store serves meanwhile.
        threading.Thread(target=self._memory.populate_library_mappings, daemon=True).start()

    def wait(self, stop: threading.Event) -> bool:
        """Waits for `stop`. Returns False when the master has ended before."""
        while not stop.wait(_POLL_S * 10):
            if self._master.poll() is not None:
                return False
        return True

    def close(self) -> None:
        """Ends the master. The blocks end with this process."""
        self._master.kill()
        self._master.wait()

    def _wait_for_master(self) -> None:
        due_s = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < due_s:
            if self._master.poll() is not None:
                raise TransferFailed(
                    f"the master at {self.address} has ended with {self._master.returncode}"
                )
            try:
                socket.create_connection((self._ip, self._port), timeout=1.0).close()
            except OSError:
                time.sleep(_POLL_S)
            else:
                return
        raise TransferFailed(f"the master at {self.address} does not start")


def _require_loopback(ip: str) -> None:
    try:
        loopback = ipaddress.IPv4Address(ip).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"listen is {ip}: the store checks no client, so it serves IPv4 addresses of loopback only; for several "
            "machines, run Mooncake's own master behind a firewall, and name it in kv_pool_address",
            metadata={"field": "listen", "value": ip},
        )


def _start_master(ip: str, port: int) -> subprocess.Popen[bytes]:
    flags = {
        "rpc_address": ip,
        "rpc_port": port,
        "rpc_thread_num": _THREADS,
        "metrics_host": ip,
        "metrics_port": free_port(ip),
        "enable_metric_reporting": "false",
        "client_ttl": _CLIENT_TTL_S,
        "default_kv_lease_ttl": _LEASE_MS,
        "logtostderr": "true",
        "minloglevel": 1,
    }
    program = Path(str(resources.files("mooncake"))) / "mooncake_master"
    return subprocess.Popen(
        [str(program), *(f"-{name}={value}" for name, value in flags.items())],
        stdin=subprocess.DEVNULL,
        preexec_fn=_end_with_parent,  # noqa: PLW1509 - no other thread runs yet
    )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit status."""
    options = parse_arguments(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        server = StoreServer(options.listen, options.memory_gib)
        if options.port_file:
            write_port_file(options.port_file, f"{server.address}\n")
    except HeadraceError as error:
        print(error.detail, file=sys.stderr)
        return _EXIT_MISCONFIGURED if isinstance(error, ConfigError) else 1
    stopped = server.wait(stop)
    server.close()
    return 0 if stopped else 1


if __name__ == "__main__":
    # Mooncake's threads may stand still, and the end of the process must not wait for them.
    os._exit(main(sys.argv[1:]))
