"""The supervisor starts, watches and ends processes."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from rich.console import Console

from headrace_cli.up.keeping import NO_RESTARTS, Restarts
from headrace_cli.up.supervisor import Supervisor
from headrace_cli.up.topology import ProcessSpec
from headrace_common.errors import WorkerGone
from tests.waiting import until

# The port file appears with its content, as services write it.
READY = (
    "import sys, pathlib; ready = pathlib.Path(sys.argv[1] + '.draft'); "
    "ready.write_text('127.0.0.1:1'); ready.replace(sys.argv[1]);"
)
# The signal handler is set before the port file appears.
ENDS_ON_SIGTERM = f"import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); {READY} signal.pause()"
IGNORES_SIGTERM = (
    f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY} "
    "signal.pause(); signal.pause()"
)

MakeSpec = Callable[..., ProcessSpec]


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(stop_grace_s=1.0)
    await supervisor.open()
    yield supervisor
    await supervisor.stop()


@pytest.fixture
def make_spec(tmp_path: Path) -> MakeSpec:
    def make(code: str, name: str = "decode-0", service: str = "decode") -> ProcessSpec:
        port_file = tmp_path / f"{name}.port"
        return ProcessSpec(
            name=name,
            service=service,
            arguments=(sys.executable, "-I", "-c", code, str(port_file)),
            port_file=port_file,
            log_file=tmp_path / f"{name}.log",
            environment={},
        )

    return make


async def until_an_end(supervisor: Supervisor) -> None:
    await Restarts(supervisor, Console(file=io.StringIO()), NO_RESTARTS).run()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_an_early_end_is_reported_with_the_end_of_the_log(
    supervisor: Supervisor, make_spec: MakeSpec
) -> None:
    child = await supervisor.start(make_spec("print('one'); print('two'); raise SystemExit(3)"))
    with pytest.raises(WorkerGone, match="decode-0 ended with 3") as raised:
        await supervisor.wait_ready([child])
    assert raised.value.metadata["log"] == "one\ntwo"


@pytest.mark.parametrize(("service", "explained"), [("prefill", True), ("decode", False)])
async def test_the_sigkill_of_a_prefill_worker_is_explained(
    supervisor: Supervisor, make_spec: MakeSpec, service: str, explained: bool
) -> None:
    child = await supervisor.start(make_spec(ENDS_ON_SIGTERM, f"{service}-0", service))
    await supervisor.wait_ready([child])
    child.process.send_signal(signal.SIGKILL)
    with pytest.raises(WorkerGone) as caught:
        await asyncio.wait_for(until_an_end(supervisor), 5)
    assert ("stood still within a write" in caught.value.detail) is explained


async def test_children_that_ignore_sigterm_are_killed_and_reported(
    supervisor: Supervisor, make_spec: MakeSpec
) -> None:
    children = [
        await supervisor.start(make_spec(IGNORES_SIGTERM, "prefill-0", "prefill")),
        await supervisor.start(make_spec(ENDS_ON_SIGTERM, "decode-0", "decode")),
    ]
    await supervisor.wait_ready(children)
    unclean = await supervisor.stop()
    assert [child.spec.name for child in unclean] == ["prefill-0"]
    assert [child.process.returncode for child in children] == [-signal.SIGKILL, 0]


async def test_other_processes_of_a_childs_group_are_killed(
    supervisor: Supervisor, make_spec: MakeSpec, tmp_path: Path
) -> None:
    pid_file = tmp_path / "grandchild"
    code = (
        f"{READY} import subprocess;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(p.pid)); p.wait()"
    )
    child = await supervisor.start(make_spec(code))
    await supervisor.wait_ready([child])
    await until(lambda: pid_file.exists() and bool(pid_file.read_text()), 5, "the grandchild")
    grandchild = int(pid_file.read_text())
    child.process.send_signal(signal.SIGKILL)
    await supervisor.stop()
    await until(lambda: not alive(grandchild), 10, "the end of the grandchild")


async def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    parent_code = f"""
import asyncio, sys
from pathlib import Path
from headrace_cli.up.supervisor import Supervisor
from headrace_cli.up.topology import ProcessSpec

async def main():
    folder = Path({str(tmp_path)!r})
    supervisor = Supervisor()
    await supervisor.open()
    spec = ProcessSpec("decode-0", "decode", (sys.executable, "-I", "-c", {ENDS_ON_SIGTERM!r}, str(folder / "port")),
                       folder / "port", folder / "log", {{}})
    child = await supervisor.start(spec)
    await supervisor.wait_ready([child])
    Path({str(pid_file)!r}).write_text(str(child.process.pid))
    await asyncio.sleep(60)

asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", parent_code)
    await until(lambda: pid_file.exists() and bool(pid_file.read_text()), 20, "the child")
    child_pid = int(pid_file.read_text())
    assert alive(child_pid)
    parent.kill()
    await parent.wait()
    await until(lambda: not alive(child_pid), 10, "the end of the child")
