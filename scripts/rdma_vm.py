"""Runs the tests of tests/rdma over RDMA verbs, in virtual machines with soft-RoCE. Needs no RDMA device and no KVM.

    python scripts/rdma_vm.py [--only one|two|JOB]
    python scripts/rdma_vm.py --only chaos [--requests COUNT] [--seed NUMBER]
    python scripts/rdma_vm.py --only vllm

The exit status is 0 when every expected case has passed and 1 otherwise. Without QEMU or Debian's packages it is 0 too,
with a prominent message.
"""

from __future__ import annotations

import argparse
import py_compile
import random
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rdma_vm_archive import write_archive
from rdma_vm_machines import (
    EMULATION,
    Fleet,
    Machine,
    accelerator,
    fleet,
    machine_limit,
)

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / folder) for folder in ("libs",))]

from headrace_common.access.roles import Role  # noqa: E402
from headrace_common.access.tokens import HeldToken, new_private_key, public_key_of  # noqa: E402
from tests.rdma.cases import (  # noqa: E402
    CHAOS,
    JOBS,
    REQUESTS_VARIABLE,
    SEED_VARIABLE,
    VLLM,
    Job,
)
from tests.rdma.report import Result, parse  # noqa: E402

CACHE = ROOT / ".cache" / "rdma"
EXIT_UNAVAILABLE = 3
# The files of this checkout in a virtual machine, beside a small Debian.
PROJECT = (
    "libs",
    "services",
    "tests/rdma",
    "tests/chaos",
    "tests/channels.py",
    "tests/component/registry/harness.py",
    "tests/fork_server.py",
    "tests/forked.py",
    "tests/freezing.py",
    "tests/ports.py",
    "tests/suite/certificates.py",
    "tests/waiting.py",
)
# The host's etcd. Only the machines of the chaos job have it.
ETCD = Path("/usr/bin/etcd")
# What the machines read of the host when they run vLLM, by the names of tests/rdma/vllm_hosts.py.
SHARES = {
    "packages": Path(sysconfig.get_paths()["purelib"]),
    "model": ROOT / "models" / "tiny-llama",
}
# The folder of the credentials in a virtual machine. tests/rdma/init.sh names its files.
CREDENTIALS = "credentials"
_TOKEN_LIFETIME_S = 7 * 86_400.0
# Timeout of all jobs together, unless one job has a longer one.
TOTAL_TIMEOUT_S = 2400.0
_POLL_S = 1.0


def main() -> int:
    """Runs the tests and returns the exit status."""
    options = parse_options(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started_s = time.monotonic()
    if CHAOS in options.jobs and not ETCD.exists():
        print(f"rdma: {ETCD} is missing, which chaos needs: make setup", file=sys.stderr)
        return 1
    if VLLM in options.jobs and not (SHARES["model"] / "config.json").exists():
        print(f"rdma: {SHARES['model']} is missing: make test-rdma-vllm", file=sys.stderr)
        return 1
    if (status := prepare_image()) is not None:
        return status
    write_initrd([ETCD] if CHAOS in options.jobs else [])
    boot = (CACHE / "vmlinuz", CACHE / "initrd.cpio")
    accel = accelerator(boot[0])
    at_once = machine_limit(max(job.memory_mib for job in options.jobs))
    how = "emulated" if accel == EMULATION else "with KVM"
    print(f"[rdma] virtual machines, {how}, up to {at_once} at once", flush=True)
    with fleet(boot, accel, CACHE) as machines:
        results = run(options, machines, at_once, started_s)
    failed = sum(not result.passed for result in results)
    if failed:
        print(f"[rdma] the consoles of the machines are in {CACHE}/console-*.log")
    # In the form of pytest's summary, which ends the other logs of CI.
    print(
        f"[rdma] {len(results) - failed} passed, {failed} failed in "
        f"{time.monotonic() - started_s:.0f} s"
    )
    return 1 if failed else 0


@dataclass(frozen=True, slots=True)
class Options:
    """The selected jobs, and the environment variables of their machines."""

    jobs: tuple[Job, ...]
    variables: Mapping[str, str]


def parse_options(words: Sequence[str]) -> Options:
    """Parses the command line. Exits with a message when it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = ("one", "two", *(job.name for job in (*JOBS, CHAOS, VLLM)))
    parser.add_argument("--only", choices=names, help="machines of a job, or one job")
    parser.add_argument("--requests", type=int, default=200, help="requests of chaos")
    parser.add_argument(
        "--seed", type=int, help="seed of chaos; the same seed gives the same faults"
    )
    chosen = parser.parse_args(words)
    if chosen.only == CHAOS.name:
        seed = random.randrange(1 << 31) if chosen.seed is None else chosen.seed
        orders = {SEED_VARIABLE: str(seed), REQUESTS_VARIABLE: str(chosen.requests)}
        return Options((CHAOS,), orders)
    if chosen.only == VLLM.name:
        return Options((VLLM,), {})
    only: str | None = chosen.only
    counts = {"one": 1, "two": 2}
    jobs = [
        job for job in JOBS if only in (None, job.name) or counts.get(only or "") == len(job.roles)
    ]
    return Options(tuple(jobs), {})


def prepare_image() -> int | None:
    """Prepares the image. Returns an exit status when the tests cannot run."""
    prepared = subprocess.run(
        [ROOT / "scripts/rdma_vm_image.sh", sys.executable],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(prepared.stdout, end="", flush=True)
    if prepared.returncode == EXIT_UNAVAILABLE:
        reason = (prepared.stdout.splitlines() or [""])[-1].removeprefix("[rdma] ")
        print(skip_message(reason), file=sys.stderr, flush=True)
        return 0
    return 1 if prepared.returncode else None


def skip_message(reason: str) -> str:
    """The prominent message for skipped tests."""
    stars = "*" * 100
    return (
        f"\n{stars}\n{stars}\n"
        "SKIPPED: ALL TESTS OVER RDMA. Nothing was checked over RDMA verbs on this machine.\n"
        f"Why: {reason}\n{stars}\n{stars}\n"
    )


def write_initrd(programs: Sequence[Path]) -> None:
    """Writes the machines' initrd: Debian's archive, followed by an archive of this checkout.

    A kernel accepts several archives in one file. `programs` of the host are at the same paths.
    """
    compiled = CACHE / "compiled"
    files = sorted(project_files())
    folders = sorted({str(parent) for path in files for parent in Path(path).parents} - {"."})
    entries = [("project", ROOT), *((f"project/{path}", ROOT / path) for path in folders)]
    for path in files:
        entries.append((f"project/{path}", ROOT / path))
        if path.endswith(".py"):
            entries += compile_file(path, compiled)
    entries += write_credentials(CACHE / CREDENTIALS)
    # Each folder must precede its files. A folder may be repeated.
    with (CACHE / "initrd.cpio").open("wb") as stream:
        stream.write((CACHE / "root.cpio").read_bytes())
        entries += [(str(program.relative_to("/")), program) for program in programs]
        write_archive(stream, [*entries, ("init", ROOT / "tests/rdma/init.sh")])


# Neither runs in a machine.
_ROLES = tuple(role for role in Role if role not in (Role.GATEWAY, Role.PLANNER))


def write_credentials(folder: Path) -> list[tuple[str, Path]]:
    """Creates a key and a token for each role, and returns the archive entries. The private key is not stored."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    private_key = new_private_key()
    contents = {"token_keys.pem": public_key_of(private_key)}
    for role in _ROLES:
        contents[f"{role}.token"] = HeldToken.create(
            private_key, role, "", _TOKEN_LIFETIME_S
        ).text.encode()
    entries = [(CREDENTIALS, folder)]
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        entries.append((f"{CREDENTIALS}/{name}", folder / name))
    return entries


def compile_file(path: str, compiled: Path) -> Iterator[tuple[str, Path]]:
    """The archive entries of a source's compiled form, because compilation under emulation is slow."""
    source = Path(path)
    name = f"{source.parent}/__pycache__/{source.stem}.{sys.implementation.cache_tag}.pyc"
    target = compiled / name
    py_compile.compile(
        str(ROOT / path),
        str(target),
        f"/project/{path}",
        doraise=True,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    yield f"project/{source.parent}/__pycache__", target.parent
    yield f"project/{name}", target


def project_files() -> Iterator[str]:
    """The project's files, relative to the checkout."""
    for folder in PROJECT:
        whole = ROOT / folder
        for path in [whole] if whole.is_file() else whole.rglob("*"):
            if path.suffix in (".py", ".yaml", ".toml", ".sh") and path.is_file():
                yield str(path.relative_to(ROOT))


def run(options: Options, machines: Fleet, at_once: int, started_s: float) -> list[Result]:
    """Runs the jobs, several at once, and prints each result. A case without a result has failed."""
    jobs = options.jobs
    waiting = list(jobs)
    give_up_s: dict[str, float] = {}
    results: dict[str, dict[str, Result]] = {job.name: {} for job in jobs}
    total_give_up_s = started_s + max(TOTAL_TIMEOUT_S, *(job.timeout_s for job in jobs))
    while waiting or give_up_s:
        while job := next_job(waiting, at_once - machines.machine_count):
            waiting.remove(job)
            shares = SHARES if job.needs_vllm else {}
            machines.start(
                job.name,
                [Machine(role, job.memory_mib, options.variables, shares) for role in job.roles],
            )
            give_up_s[job.name] = min(time.monotonic() + job.timeout_s, total_give_up_s)
        for name, line in machines.lines(_POLL_S):
            known = results[name]
            result = parse(line)
            # A later success does not replace a failure.
            if result and (result.name not in known or known[result.name].passed):
                known[result.name] = result
                print(row(result, time.monotonic() - started_s), flush=True)
        for name in list(give_up_s):
            late = time.monotonic() > give_up_s[name]
            if machines.is_off(name) or late:
                machines.end(name)
                del give_up_s[name]
                why = "the time limit has passed" if late else "no result was received"
                job = next(job for job in jobs if job.name == name)
                for result in missing(job, results[name], why):
                    results[name][result.name] = result
                    print(row(result, time.monotonic() - started_s), flush=True)
    return [result for known in results.values() for result in known.values()]


def next_job(waiting: Sequence[Job], free: int) -> Job | None:
    """The first job that fits into the free machines, or None."""
    return next((job for job in waiting if len(job.roles) <= free), None)


def missing(job: Job, known: dict[str, Result], why: str) -> list[Result]:
    """Failures for the expected cases of the job without a result."""
    return [
        Result(case, passed=False, duration_s=0.0, note=why)
        for case in job.expected_names()
        if case not in known
    ]


def row(result: Result, at_s: float) -> str:
    """One line of the table."""
    verdict = "ok    " if result.passed else "FAILED"
    return f"{at_s:5.0f} s  {verdict} {result.name:<40} {result.duration_s:5.1f} s  {result.note}"


if __name__ == "__main__":
    sys.exit(main())
