"""Services as forks that another process asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What forks must have no threads, so it is a process of its own, as in the virtual machines.
PROGRAM = """
import asyncio, socket, signal, sys
from pathlib import Path
from headrace_cli.up.supervisor import Supervisor
from headrace_cli.up.topology import ProcessSpec
from tests.fork_server import ForkClient, ForkServer
from tests.forked import fork

folder = Path(sys.argv[1])
ours, theirs = socket.socketpair()

def spec(name):
    arguments = (sys.executable, "-m", "guest_module", name)
    files = (folder / f"{name}.port", folder / f"{name}.log")
    return ProcessSpec(name, "decode", arguments, *files, {"COLOR": f"{name}'s"})

async def ask():
    client = ForkClient(theirs)
    supervisor = Supervisor(5.0, client.spawn)
    await supervisor.open()
    try:
        ends, waits, left = [await supervisor.start(spec(n)) for n in ("ends", "waits", "left")]
        assert await ends.process.wait() == 3
        assert not ends.running
        try:
            ends.process.send_signal(signal.SIGTERM)
        except ProcessLookupError:
            pass
        else:
            raise AssertionError("a signal went to nobody")
        assert waits.running
        waits.process.send_signal(signal.SIGKILL)
        assert await waits.process.wait() == -signal.SIGKILL
        print(left.process.pid, flush=True)
        if "stop" in sys.argv:
            await supervisor.stop()
            assert left.process.returncode == -signal.SIGTERM, left.process.returncode
    finally:
        await client.close()

def main():
    ours.close()
    asyncio.run(ask())

asking = fork("asking", main)
theirs.close()
ForkServer().serve(ours)
sys.exit(asking.wait(5.0))
"""
MODULE = """
import os, sys, time
assert __name__ == "__main__"
print(sys.argv[1:], os.environ["COLOR"], flush=True)
if sys.argv[1] == "ends":
    sys.exit(3)
time.sleep(30)
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "guest_module.py").write_text(MODULE)
    path = [str(folder), str(ROOT), str(ROOT / "libs")]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *words],
        env={"PYTHONPATH": ":".join(path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )


def test_forks_are_what_was_asked_for_and_their_ends_are_heard(tmp_path: Path) -> None:
    done = run(tmp_path, "stop")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ends.log").read_text() == "['ends'] ends's\n"


def test_no_fork_outlives_those_who_asked_for_it(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert not Path(f"/proc/{done.stdout.strip()}").exists()
