"""Two hosts on one machine: shells in network and mount namespaces of their own, joined by a cable.

Each host has its own /etc and /opt, in which changes stay with the host. Needs to own a network and a mount namespace:
`unshare --map-root-user --net --mount`.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from tests.documented import Block
from tests.unit.test_architecture import ROOT

_MARK: Final = "end of command"
_READ_BYTES: Final = 65_536
_COMMAND_S: Final = 120.0
_END_S: Final = 30.0
_READY_S: Final = 90.0
_SCP: Final = """#!/bin/sh
# Stands for scp: hosts are folders here. Copies [-r] SOURCE TARGET, one of them as HOST:PATH.
set -eu
flags=
if [ "$1" = -r ]; then flags=-r; shift; fi
there() { case $1 in *:*) echo "$HOSTS/${1%%:*}${1#*:}" ;; *) echo "$1" ;; esac; }
cp $flags "$(there "$1")" "$(there "$2")"
"""
_SYSTEMCTL: Final = """#!{python}
# Stands for systemctl: starts what a unit's ExecStart names, with its Environment, and waits until it is ready.
import os, pathlib, shlex, socket, subprocess, sys

words = sys.argv[1:]
if words == ["daemon-reload"]:
    sys.exit(0)
assert words[:2] == ["enable", "--now"], words
home = pathlib.Path(os.environ["HOME"])
ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
ready.settimeout({ready_s})
address = str(home / "notify")
ready.bind(address)
for name in words[2:]:
    text = pathlib.Path(f"/etc/systemd/system/{{name}}.service").read_text()
    settings = [line.partition("=") for line in text.splitlines() if "=" in line and line[0] != "#"]
    (start,) = (value for key, _, value in settings if key == "ExecStart")
    own = dict(value.split("=", 1) for key, _, value in settings if key == "Environment")
    assert ("Type", "=", "notify") in settings, name
    with (home / f"{{name}}.log").open("wb") as log:
        process = subprocess.Popen(
            shlex.split(start), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            env={{**os.environ, **own, "HOME": str(home), "NOTIFY_SOCKET": address}},
            start_new_session=True,
        )
    with (home / "pids").open("a") as pids:
        pids.write(f"{{process.pid}}\\n")
for _ in words[2:]:
    assert ready.recv(64) == b"READY=1"
"""


class HostShell:
    """A shell on one of the hosts. Its variables and its folder stay between commands."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            ["unshare", "--net", "--mount", "bash"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **environment, "HOME": str(folder)},
        )

    @property
    def pid(self) -> int:
        """Process id of the shell, which is in the host's namespaces."""
        return self._process.pid

    def run(self, command: str, timeout_s: float = _COMMAND_S) -> tuple[int, str]:
        """Runs a command, and returns its exit status and its output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # The line break ends an unfinished line of the command.
        self._process.stdin.write(f"{command}\nprintf '\\n{_MARK} %d\\n' $?\n".encode())
        self._process.stdin.flush()
        end_s = time.monotonic() + timeout_s
        text = ""
        while True:
            head, found, tail = text.rpartition(f"\n{_MARK} ")
            if found and tail.endswith("\n"):
                return int(tail), head.strip()
            left_s = end_s - time.monotonic()
            ready = select.select([self._process.stdout], [], [], max(left_s, 0.0))[0]
            assert ready, f"{command} has not ended in time:\n{text}"
            data = os.read(self._process.stdout.fileno(), _READ_BYTES)
            assert data, f"the shell has ended at {command}:\n{text}"
            text += data.decode(errors="replace")

    def must(self, command: str, statuses: tuple[int, ...] = (0,)) -> str:
        """As `run`, for a command that ends with one of these statuses."""
        status, output = self.run(command)
        assert status in statuses, f"status {status} of: {command}\n{output}\n{self.logs()}"
        return output

    def logs(self) -> str:
        """The ends of the services' logs on all hosts."""
        found = sorted(self.folder.parent.parent.glob("*/work/*.log"))
        tails = (f"{path.name}:\n{path.read_text()[-2_000:]}" for path in found)
        return "\n".join(tails)

    def close(self) -> None:
        """Ends the services of this host and the shell."""
        pids = self.folder / "pids"
        for line in pids.read_text().split() if pids.exists() else ():
            self.run(f"kill -KILL {line} 2>&1 || true")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_END_S)


@contextmanager
def two_hosts(
    folder: Path, addresses: tuple[str, str], environment: dict[str, str]
) -> Iterator[tuple[HostShell, HostShell]]:
    """Two hosts with these addresses in one network of 24 bits."""
    programs = folder / "programs"
    programs.mkdir()
    for name, text in (
        ("scp", _SCP),
        ("systemctl", _SYSTEMCTL.format(python=sys.executable, ready_s=_READY_S)),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    hosts = folder / "hosts"
    with ExitStack() as stack:
        shells = []
        for address in addresses:
            own = hosts / address
            (own / "work").mkdir(parents=True)
            # Files that this user cannot read are those of other programs.
            with suppress(shutil.Error):
                shutil.copytree("/etc", own / "etc", symlinks=True)
            (own / "work" / "docker").symlink_to(ROOT / "docker")
            path = f"{programs}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
            shell = HostShell(own / "work", {**environment, "PATH": path, "HOSTS": str(hosts)})
            stack.callback(shell.close)
            shells.append(shell)
        first, second = shells
        # A command that a shell has answered was run in its own namespaces.
        for shell in shells:
            shell.must("true")
        _ip("link", "add", "cable0", "type", "veth", "peer", "name", "cable1")
        for index, (shell, address) in enumerate(zip(shells, addresses, strict=True)):
            _ip("link", "set", f"cable{index}", "netns", str(shell.pid))
            for command in (
                "ip link set lo up",
                f"ip address add {address}/24 dev cable{index}",
                f"ip link set cable{index} up",
                f"mount --bind {hosts / address / 'etc'} /etc",
                "mount -t tmpfs tmpfs /opt",
                f"ln -s {ROOT / '.venv'} /opt/headrace",
            ):
                shell.must(command)
        yield first, second


def run_block(shell: HostShell, block: Block) -> str:
    """Runs the commands of a block, and returns the output of the last one."""
    output = ""
    for command in block.commands:
        output = shell.must(command, block.statuses)
    return output


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=_END_S)
