"""Checks of this host: the ports of KV transfers, and the kernel's features."""

from __future__ import annotations

import ctypes
import selectors
import socket
import struct
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
_PTRACE_SCOPE: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
# No process connects from here, so no worker admits it.
_UNUSED_SOURCE, _LOOPBACK = "127.77.77.77", "127.0.0.1"
_CONNECT_TIMEOUT_S: Final = 0.3
_SO_ATTACH_FILTER: Final = 26
_ADMIT_ALL: Final = struct.pack("@HBBI", 0x06, 0, 0, 0xFFFFFFFF)


def check_host() -> list[Finding]:
    """The ports and the kernel of this host."""
    return [_check_kv_ports(), _check_filters(), _check_ptrace_scope()]


def listening_ports() -> set[int]:
    """The ports of all listening TCP sockets of this host."""
    lines = [
        line.split()
        for table in _TABLES
        if Path(table).exists()
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]
    ]
    return {int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == _LISTENS}


def _check_kv_ports() -> Finding:
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
        "`headrace doctor --firewall`",
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


def _check_filters() -> Finding:
    """Tries what a worker does with the sockets of its KV transport."""
    subject = "socket filters"
    code = ctypes.create_string_buffer(_ADMIT_ALL, len(_ADMIT_ALL))
    header = struct.pack("@HP", 1, ctypes.addressof(code))
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, header)
        except OSError as error:
            return Finding(
                Verdict.ERROR,
                subject,
                f"the kernel refuses them ({error.strerror}), so KV ports are open to every host",
                "apply `headrace doctor --firewall`, or use a kernel with SO_ATTACH_FILTER",
            )
    return Finding(Verdict.OK, subject, "the kernel accepts them, so KV ports can be restricted")


def _check_ptrace_scope() -> Finding:
    subject = "same_host"
    try:
        scope = int(_PTRACE_SCOPE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        scope = 0
    if scope == 0:
        return Finding(Verdict.OK, subject, "processes of one user may copy KV to each other")
    return Finding(
        Verdict.WARNING,
        subject,
        f"Yama's ptrace_scope is {scope}: the transport same_host "
        + ("works when it is set by name" if scope == 1 else "does not work"),
        "use the transport mooncake, or set kernel.yama.ptrace_scope to 0",
    )
