"""Checks the ports of KV transfers on this host."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from headrace_cli.doctor.finding import Finding, Verdict

KV_PORTS: Final = range(15_000, 17_001)
"""Mooncake chooses its ports from these."""

_LISTENS: Final = "0A"
_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
# No process connects from here, so no worker admits it.
_UNUSED_SOURCE, _LOOPBACK = "127.77.77.77", "127.0.0.1"
_CONNECT_TIMEOUT_S: Final = 0.3


def listening_ports() -> set[int]:
    """The ports of all listening TCP sockets of this host."""
    lines = [
        line.split()
        for table in _TABLES
        if Path(table).exists()
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]
    ]
    return {int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == _LISTENS}


def check_kv_ports() -> Finding:
    """Whether a KV transport on this host admits addresses that no worker has."""
    ports = sorted(listening_ports().intersection(KV_PORTS))
    subject = "KV ports"
    if not ports:
        return Finding(Verdict.OK, subject, "no KV transport listens on this host")
    reached = _ports_that_accept_strangers(ports)
    if not reached:
        detail = f"{len(ports)} ports of KV transports, none of which admits a host without a role"
        return Finding(Verdict.OK, subject, detail)
    names = ", ".join(map(str, reached))
    return Finding(
        Verdict.ERROR,
        subject,
        f"ports {names} accept connections of hosts without a role. A KV transport there could be read and written",
        "read the worker's log for the cause, narrow its transfer_peer_networks, or apply "
        "a firewall: docs/security.md",
    )


def _ports_that_accept_strangers(ports: Sequence[int]) -> list[int]:
    """Tries all ports at once, because a port that filters its callers lets each of them wait."""
    with ExitStack() as held, selectors.DefaultSelector() as selector:
        for port in ports:
            caller = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            caller.setblocking(False)
            try:
                caller.bind((_UNUSED_SOURCE, 0))
                caller.connect_ex((_LOOPBACK, port))
            except OSError:
                continue
            selector.register(caller, selectors.EVENT_WRITE, (caller, port))
        reached: list[int] = []
        end_s = time.monotonic() + _CONNECT_TIMEOUT_S
        while selector.get_map() and (left_s := end_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                caller, port = key.data
                selector.unregister(caller)
                if not caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    reached.append(port)
    return sorted(reached)
