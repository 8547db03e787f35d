"""Runs the tests of tests/rdma on real RDMA verbs, in virtual machines with soft-RoCE: no RDMA device, no KVM needed.

    python scripts/rdma_vm.py [--only one|two]

First everything in one machine, then two machines as two hosts. Exit status 0 when every expected case has passed,
also when QEMU cannot be installed here, which is said loudly; 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / folder) for folder in ("libs",))]

from tests.rdma.cases import expected_names  # noqa: E402
from tests.rdma.report import Result, parse  # noqa: E402

CACHE = ROOT / ".cache" / "rdma"
CANNOT_INSTALL = 3
# What a machine gets of this checkout, beside its own small Debian.
PROJECT = ("libs", "services", "tests/rdma")
# On a quiet machine a third of it; emulation shares the cores with whoever else is there.
MACHINE_TIMEOUT_S = {1: 400.0, 2: 120.0}
_MEMORY_MIB = 3072
_MIB_OF_HOSTS = 2048


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("one", "two"), help="machines in one run")
    only = parser.parse_args().only
    prepared = subprocess.run([ROOT / "scripts/rdma_vm_image.sh", sys.executable], check=False)
    if prepared.returncode == CANNOT_INSTALL:
        print("\n" + "*" * 100, file=sys.stderr)
        print("SKIPPED: the RDMA tests, because QEMU cannot be installed here", file=sys.stderr)
        print("*" * 100, file=sys.stderr)
        return 0
    if prepared.returncode:
        return 1
    started_s = time.monotonic()
    write_initrd()
    results: list[Result] = []
    for host_count, name in ((1, "one"), (2, "two")):
        if only in (None, name):
            results += run(host_count)
    passed = sum(result.passed for result in results)
    failed = len(results) - passed
    print(f"{passed} passed, {failed} failed in {time.monotonic() - started_s:.0f} s")
    return 1 if failed else 0


def write_initrd() -> None:
    """The machine's Debian with this checkout behind it: a kernel takes several archives in a row."""
    files = sorted(project_files())
    folders = sorted({str(parent) for path in files for parent in Path(path).parents} - {"."})
    with (CACHE / "initrd.cpio").open("wb") as archive:
        archive.write((CACHE / "root.cpio").read_bytes())
        archive.flush()
        staged = CACHE / "staged"
        staged.mkdir(exist_ok=True)
        for link, target in (("project", ROOT), ("init", ROOT / "tests/rdma/init.sh")):
            (staged / link).unlink(missing_ok=True)
            (staged / link).symlink_to(target)
        # Names go through the link, so that the archive has the folder /project and not this checkout's place.
        names = ["project", *(f"project/{path}" for path in [*folders, *files]), "init"]
        subprocess.run(
            ["cpio", "--quiet", "--dereference", "-o", "-H", "newc"],
            cwd=staged,
            input="\n".join(names).encode(),
            stdout=archive,
            check=True,
        )


def project_files() -> Iterator[str]:
    """Python sources, relative to the checkout."""
    for folder in PROJECT:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".toml", ".sh") and path.is_file():
                yield str(path.relative_to(ROOT))


def run(host_count: int) -> list[Result]:
    """Boots the machines and prints a table of what they report; cases that nobody reported have failed."""
    print(f"[rdma] {host_count} virtual machine(s), emulated", flush=True)
    started_s = time.monotonic()
    results: dict[str, Result] = {}
    with machines(host_count) as processes:
        for result in watch(processes, started_s + MACHINE_TIMEOUT_S[host_count]):
            # A case that failed stays failed.
            if result.name not in results or results[result.name].passed:
                results[result.name] = result
                print(row(result), flush=True)
    for name in expected_names(host_count):
        if name not in results:
            results[name] = Result(name, passed=False, duration_s=0.0, note="no result came back")
            print(row(results[name]))
    if not all(result.passed for result in results.values()):
        print(f"[rdma] the machines' own words are in {CACHE}/console-{host_count}-*.log")
    print(f"[rdma] {time.monotonic() - started_s:.0f} s, start and end included", flush=True)
    return list(results.values())


def row(result: Result) -> str:
    """One line of the table."""
    verdict = "ok    " if result.passed else "FAILED"
    return f"  {verdict} {result.name:<42} {result.duration_s:6.1f} s  {result.note}"


@contextmanager
def machines(host_count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Running machines, whose consoles can be read; none is left afterwards."""
    port = free_port()
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(1, host_count + 1):
            network = ["-net", "none"]
            if host_count > 1:
                side = "listen" if number == 1 else "connect"
                mac = f"52:54:00:00:00:{number:02x}"
                network = [
                    *("-netdev", f"socket,id=net,{side}=127.0.0.1:{port}"),
                    *("-device", f"virtio-net-pci,netdev=net,mac={mac}"),
                ]
            started.append(
                subprocess.Popen(
                    command(host_count, number, network),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
            # The second can only connect to a first that listens.
            time.sleep(0.5 if host_count > 1 else 0)
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def command(host_count: int, number: int, network: Sequence[str]) -> list[str]:
    """A machine without disk: all that it has is in the initrd."""
    kernel = "console=ttyS0 rdinit=/init quiet loglevel=1 panic=1"
    if host_count > 1:
        kernel += f" HEADRACE_RDMA_HOST={number}"
    return [
        "qemu-system-x86_64",
        *("-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max"),
        *("-smp", "2" if host_count == 1 else "1"),
        *("-m", str(_MEMORY_MIB if host_count == 1 else _MIB_OF_HOSTS)),
        *("-kernel", str(CACHE / "vmlinuz"), "-initrd", str(CACHE / "initrd.cpio")),
        *("-append", kernel, "-nographic", "-no-reboot"),
        *network,
    ]


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def watch(processes: list[subprocess.Popen[bytes]], give_up_s: float) -> Iterable[Result]:
    """Results as they come, until the machines are off or time is up; keeps what the consoles said."""
    with selectors.DefaultSelector() as selector:
        pending = {}
        for number, process in enumerate(processes, 1):
            assert process.stdout is not None
            log = (CACHE / f"console-{len(processes)}-{number}.log").open("wb")
            selector.register(process.stdout, selectors.EVENT_READ, log)
            pending[process.stdout.fileno()] = b""
        while selector.get_map():
            remaining_s = give_up_s - time.monotonic()
            if remaining_s <= 0:
                print("[rdma] time is up: the machines are switched off", file=sys.stderr)
                break
            for key, _ in selector.select(remaining_s):
                data = os.read(key.fd, 65536)
                key.data.write(data)
                if not data:
                    selector.unregister(key.fileobj)
                    key.data.close()
                *lines, pending[key.fd] = (pending[key.fd] + data).split(b"\n")
                for line in lines:
                    if result := parse(line.decode(errors="replace")):
                        yield result
        for key in list(selector.get_map().values()):
            with suppress(OSError):
                key.data.close()


if __name__ == "__main__":
    sys.exit(main())
