"""The fork server starts services for another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A process that forks must have no threads, so it is a separate process, as in the virtual machines.
PROGRAM = """
import asyncio, socket, signal, sys
from pathlib import Path
from headrace_cli.up.supervisor import Supervisor
from headrace_cli.up.topology import ProcessSpec
from tests.fork_server import ForkClient, ForkServer
from tests.forked import fork

folder = Path(sys.argv[1])
server_end, client_end = socket.socketpair()

def spec(name):
    arguments = (sys.executable, "-m", "guest_module", name)
    files = (folder / f"{name}.port", folder / f"{name}.log")
    return ProcessSpec(name, "decode", arguments, *files, {"COLOR": f"{name}'s"})

async def run_client():
    client = ForkClient(client_end)
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
            raise AssertionError("a signal was sent to an ended process")
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
    server_end.close()
    asyncio.run(run_client())

client_process = fork("client", main)
client_end.close()
ForkServer().serve(server_end)
sys.exit(client_process.wait(5.0))
"""
MODULE = """
import os, sys, time
assert __name__ == "__main__"
print(sys.argv[1:], os.environ["COLOR"], flush=True)
if sys.argv[1] == "ends":
    sys.exit(3)
time.sleep(30)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "guest_module.py").write_text(MODULE)
    path = [str(folder), str(ROOT), str(ROOT / "libs")]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *arguments],
        env={"PYTHONPATH": ":".join(path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )


def test_forks_run_the_requested_modules_and_their_exits_are_reported(tmp_path: Path) -> None:
    done = run(tmp_path, "stop")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ends.log").read_text() == "['ends'] ends's\n"


def test_forks_are_killed_when_their_client_exits(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert not Path(f"/proc/{done.stdout.strip()}").exists()
