"""Another host: a process in a network namespace of its own, joined to its parent's by a pair of interfaces.

The parent calls `OtherHost`, which needs to own its network namespace. Commands and replies are lines of JSON.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

LOOPBACK, HERE, HERE_IPV6 = "127.0.0.1", "10.77.0.1", "fd77::1"
# A connection takes milliseconds. A host that is dropped by a firewall does not answer at all.
_CONNECT_TIMEOUT_S = 5.0

Target = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Link:
    """The pair of interfaces that joins other host `number`, from 0. The first has the addresses HERE and HERE_IPV6."""

    number: int

    @property
    def here(self) -> str:
        return f"10.77.{self.number}.1"

    @property
    def here_ipv6(self) -> str:
        return f"fd77:{self.number:x}::1" if self.number else HERE_IPV6

    @property
    def there(self) -> str:
        return f"10.77.{self.number}.2"

    @property
    def there_ipv6(self) -> str:
        """Read as an IPv4 packet's, the header of an IPv6 packet from the first one has the destination HERE."""
        return f"fd77:{self.number:x}::2" if self.number else "fd77::a4d:1:0:2"

    @property
    def interface(self) -> str:
        return f"local{self.number}"

    @property
    def peer_interface(self) -> str:
        return f"remote{self.number}"


class OtherHost:
    """Packets to LOOPBACK from the other host reach this one, as with Kubernetes' setting route_localnet.

    There may be several, each with a `number`. All reach HERE.
    """

    def __init__(self, number: int = 0) -> None:
        self._link = link = _Link(number)
        self._process = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-m", __name__, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()
        pair = f"type veth peer name {link.peer_interface} netns {self._process.pid}"
        _run_ip(f"link set lo up; link add {link.interface} {pair}")
        _configure(link.interface, link.here, link.here_ipv6)
        self._ask("configure")

    @property
    def pid(self) -> int:
        """Process id of the other host's first process."""
        return self._process.pid

    @property
    def peer_interface(self) -> str:
        """The other host's interface."""
        return self._link.peer_interface

    @property
    def address(self) -> str:
        """The other host's address."""
        return self._link.there

    def reached(self, targets: Sequence[Target]) -> set[Target]:
        """The targets that accept a connection of the other host."""
        return {(host, port) for host, port in self._ask("connect", targets)}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10.0)

    def _ask(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def _configure(interface: str, address: str, ipv6_address: str) -> None:
    _run_ip(
        f"link set {interface} up; address add {address}/24 dev {interface};"
        f"-6 address add {ipv6_address}/64 dev {interface} nodad"
    )
    for name in ("all", interface):
        Path(f"/proc/sys/net/ipv4/conf/{name}/route_localnet").write_text("1", encoding="utf-8")


def _run_ip(commands: str) -> None:
    for command in commands.split(";"):
        subprocess.run(["ip", *command.split()], check=True)


def _configure_there(link: _Link) -> None:
    _configure(link.peer_interface, link.there, link.there_ipv6)
    for address in {LOOPBACK, HERE}:
        _run_ip(f"route replace {address}/32 dev {link.peer_interface} src {link.there}")


def _connect(targets: Sequence[Target]) -> list[Target]:
    def connects(target: Target) -> bool:
        host, port = target
        try:
            socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(len(targets)) as threads:
        results = threads.map(connects, targets)
        return [target for target, result in zip(targets, results, strict=True) if result]


def _main(number: int) -> None:
    """Answers the parent's commands until it kills this process."""
    link = _Link(number)
    operations: dict[str, Any] = {
        "configure": partial(_configure_there, link),
        "connect": _connect,
    }
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(operations[name](*arguments)), flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
