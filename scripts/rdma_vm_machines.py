"""Virtual machines for the RDMA tests: QEMU's command line, and the lines of the consoles."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

EMULATION = "tcg"
VIRTUALIZATION = "kvm"
# Under emulation `rep movsb` copies single bytes. Without these features, programs do not use it.
_CPU = {EMULATION: "max,erms=off,fsrm=off", VIRTUALIZATION: "host"}
# Without no_timer_check, the kernel panics when the machine pauses during its timer check.
_KERNEL_WORDS = "console=ttyS0 rdinit=/init quiet loglevel=1 panic=1 no_timer_check"
_KVM = Path("/dev/kvm")
_KVM_TRIAL_S = 10.0
# The RDMA device and TCP have separate networks, so that their traffic is counted separately.
_NETWORKS = ("control", "roce")
SHARES_VARIABLE = "HEADRACE_RDMA_SHARES"


def accelerator(kernel: Path) -> str:
    """KVM if it boots this kernel, otherwise emulation.

    Some hypervisors offer a KVM device that boots only their own kernels, so this tries to boot.
    """
    flags = Path("/proc/cpuinfo").read_text().split()
    if not ({"vmx", "svm"} & set(flags) and os.access(_KVM, os.R_OK | os.W_OK)):
        return EMULATION
    trial = [
        *("qemu-system-x86_64", "-machine", "q35", "-accel", "kvm", "-cpu", "host", "-m", "512"),
        *("-kernel", str(kernel), "-append", "console=ttyS0 panic=-1"),
        *("-nographic", "-no-reboot", "-net", "none"),
    ]
    try:
        output = subprocess.run(
            trial, stdin=subprocess.DEVNULL, capture_output=True, timeout=_KVM_TRIAL_S, check=False
        ).stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
    return VIRTUALIZATION if b"Linux version" in output else EMULATION


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine to boot. The environment of its first process has its role and `variables`."""

    role: str
    memory_mib: int
    variables: Mapping[str, str]
    shares: Mapping[str, Path] = field(default_factory=dict)
    """Folders of the host that the machine may read, by name."""


def command(
    machine: Machine, boot: tuple[Path, Path], accel: str, links: Sequence[tuple[str, int]]
) -> list[str]:
    """QEMU's command line for a machine without a disk. `boot` is the kernel and the archive of its files.

    The machine has one processor, because a second one slows emulation more than it helps. `links` has the hardware
    address and an open socket for each network.
    """
    network = ["-net", "none"]
    if links:
        network = [
            word
            for number, (address, descriptor) in enumerate(links)
            for word in (
                *("-netdev", f"socket,id=net{number},fd={descriptor}"),
                *("-device", f"virtio-net-pci,netdev=net{number},mac={address},romfile="),
            )
        ]
    kernel, archive = boot
    variables = {"HEADRACE_RDMA_ROLE": machine.role, **machine.variables}
    shares: list[str] = []
    if machine.shares:
        variables[SHARES_VARIABLE] = ",".join(machine.shares)
    for name, folder in machine.shares.items():
        share = f"local,path={folder},mount_tag={name},security_model=none"
        shares += ["-virtfs", f"{share},readonly=on,multidevs=remap"]
    words = " ".join([_KERNEL_WORDS, *(f"{name}={value}" for name, value in variables.items())])
    return [
        "qemu-system-x86_64",
        *("-machine", "q35", "-cpu", _CPU[accel], "-smp", "1", "-m", str(machine.memory_mib)),
        *("-accel", f"{accel},thread=multi" if accel == EMULATION else accel),
        *("-kernel", str(kernel), "-initrd", str(archive), "-append", words),
        *("-nographic", "-no-reboot", *network, *shares),
    ]


def links_between(count: int, stack: ExitStack) -> list[list[tuple[str, int]]]:
    """For each machine, its hardware address and socket in each network. A single machine has none."""
    if count == 1:
        return [[]]
    assert count == 2, "a network connects exactly two machines"
    ends: list[list[tuple[str, int]]] = [[], []]
    for number, _ in enumerate(_NETWORKS):
        pair = socket.socketpair()
        for side, end in enumerate(pair):
            stack.enter_context(end)
            ends[side].append((f"52:54:00:00:{number:02x}:{side + 1:02x}", end.fileno()))
    return ends


@dataclass(slots=True)
class Console:
    """The console of one machine. Its output goes to `log`, and to the caller as lines."""

    job: str
    log: BinaryIO
    pending: bytes = b""

    def add_output(self, data: bytes) -> list[str]:
        """Logs the bytes and returns the lines that they complete."""
        self.log.write(data)
        self.log.flush()
        *lines, self.pending = (self.pending + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


@dataclass(slots=True)
class Fleet:
    """The running machines, by job. Use `with fleet(...)`, which ends all of them."""

    boot: tuple[Path, Path]
    accel: str
    log_folder: Path
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _processes: dict[str, list[subprocess.Popen[bytes]]] = field(default_factory=dict)

    @property
    def machine_count(self) -> int:
        """Number of machines that may be running."""
        return sum(map(len, self._processes.values()))

    def start(self, job: str, machines: Sequence[Machine]) -> None:
        """Boots the machines of a job, and connects two machines by networks."""
        started = self._processes[job] = []
        with ExitStack() as stack:
            ends = links_between(len(machines), stack)
            for machine, links in zip(machines, ends, strict=True):
                process = subprocess.Popen(
                    command(machine, self.boot, self.accel, links),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[descriptor for _, descriptor in links],
                )
                started.append(process)
                assert process.stdout is not None
                log = (self.log_folder / f"console-{machine.role}.log").open("wb")
                self._selector.register(process.stdout, selectors.EVENT_READ, Console(job, log))

    def lines(self, timeout_s: float) -> Iterator[tuple[str, str]]:
        """Yields (job, console line) within the timeout. Removes consoles that are closed."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            data = os.read(key.fd, 65536)
            console: Console = key.data
            for line in console.add_output(data):
                yield console.job, line
            if not data:
                self._selector.unregister(key.fileobj)
                console.log.close()

    def is_off(self, job: str) -> bool:
        """Whether all consoles of the job are closed."""
        return all(key.data.job != job for key in self._selector.get_map().values())

    def end(self, job: str) -> None:
        """Ends the machines of the job."""
        for process in self._processes.pop(job):
            process.kill()
            process.wait()
            assert process.stdout is not None
            if process.stdout.fileno() in self._selector.get_map():
                self._selector.unregister(process.stdout).data.log.close()
            process.stdout.close()

    def end_all(self) -> None:
        """Ends all machines."""
        for job in list(self._processes):
            self.end(job)
        self._selector.close()


@contextmanager
def fleet(boot: tuple[Path, Path], accel: str, log_folder: Path) -> Iterator[Fleet]:
    """A fleet without machines, which ends its machines when the block ends."""
    machines = Fleet(boot, accel, log_folder)
    try:
        yield machines
    finally:
        machines.end_all()


def machine_limit(machine_mib: int) -> int:
    """The number of machines to run at once: one more than processors, because they often wait, within the memory."""
    available_kib = next(
        int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    by_memory = available_kib // 1024 // machine_mib
    return max(2, min(len(os.sched_getaffinity(0)) + 1, by_memory))
