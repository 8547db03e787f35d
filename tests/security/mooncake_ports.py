"""Which ports of a Mooncake transport another host reaches: python -m tests.security.mooncake_ports HOST.

Needs to own its network namespace. Prints a report as JSON.
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace_kv.transport.base import KvTransport
from headrace_kv.transport.factory import open_transport
from tests.rdma.harness import one_run
from tests.security.other_host import HERE, HERE_IPV6, LOOPBACK, OtherHost

_NBYTES = 1 << 20
_LISTENS = "0A"
_MOONCAKE_PORTS = range(15_000, 17_001)


def listening_ports() -> set[int]:
    """The ports of all listening TCP sockets of the network namespace."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/self/net", name).read_text(encoding="utf-8").splitlines()[1:]
    ]
    return {int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == _LISTENS}


def main(host: str) -> None:
    """Opens two transports at `host`, writes from one to the other, and lets another host try."""
    other = OtherHost()
    try:
        receiver, sender = (open_transport("mooncake", host, "tcp") for _ in range(2))
        target, source = np.zeros(_NBYTES, dtype=np.uint8), np.ones(_NBYTES, dtype=np.uint8)
        receiver.register(target.ctypes.data, _NBYTES)
        sender.register(source.ctypes.data, _NBYTES)
        run = one_run(source.ctypes.data, target.ctypes.data, _NBYTES)
        sender.write(receiver.session, run, 10.0)
        print(json.dumps(_report(other, receiver, target)))
        receiver.close()
        sender.close()
    finally:
        other.close()


def _report(
    other: OtherHost, receiver: KvTransport, target: npt.NDArray[np.uint8]
) -> dict[str, object]:
    written_here = bool((target == 1).all())
    ports = listening_ports()
    hosts = (LOOPBACK, HERE, HERE_IPV6)
    # Reachable at every address: shows that the packets of the other host arrive.
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as control:
        control_port = control.getsockname()[1]
        reached = other.reached(list(itertools.product(hosts, {*ports, control_port})))
    answer = other.write(receiver.session, target.ctypes.data, _NBYTES)
    return {
        "ports": sorted(ports.intersection(_MOONCAKE_PORTS)),
        "other_ports": sorted(ports.difference(_MOONCAKE_PORTS)),
        "written_here": written_here,
        "control": sorted(host for host, port in reached if port == control_port),
        "reached": sorted(item for item in reached if item[1] != control_port),
        "write": answer,
        "written_there": bool((target == 7).any()),
    }


if __name__ == "__main__":
    main(sys.argv[1])
