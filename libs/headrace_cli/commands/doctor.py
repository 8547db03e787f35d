"""`headrace doctor`: finds what is wrong with a deployment and with this host."""

from __future__ import annotations

import ipaddress
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from headrace_cli.checks import (
    Finding,
    Verdict,
    check_credentials,
    check_members,
    check_software,
    check_versions,
    failed,
    find_members,
    passed,
    warned,
)
from headrace_cli.client import registry_of
from headrace_cli.options import DEFAULT_ROUTER, AddressedCommand, Registry, Router
from headrace_cli.output import EXIT_FAILED, Json, answer_console, command, print_json
from headrace_common.errors import HeadraceError

_CLASS: Final = Path("/sys/class/infiniband")
_DEVICES: Final = Path("/dev/infiniband")
_PEER_MEMORY: Final = Path("/sys/module/nvidia_peermem")
_NVIDIA: Final = Path("/proc/driver/nvidia/version")
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_GIDS_MAX: Final = 256
"""Most GIDs of a port that are read. A port has 255 at most on present adapters."""
_ACTIVE: Final = "ACTIVE"
_ROCE_2: Final = "RoCE v2"
_ETHERNET: Final = "Ethernet"


def check_rdma() -> list[Finding]:
    """Adapters with their ports and GIDs, and what RDMA needs of this host."""
    adapters = sorted(path for path in _entries(_CLASS) if (path / "ports").is_dir())
    if not adapters:
        return [
            warned(
                "RDMA",
                "this host has no RDMA adapter, so KV moves over TCP",
                "install the adapter's driver and rdma-core, or leave it so. `modprobe rdma_rxe` and "
                "`rdma link add` make one of an Ethernet port, for tests",
            ),
            _check_locked_memory(needed=False),
            _check_huge_pages(),
        ]
    ports = [port for adapter in adapters for port in sorted(_entries(adapter / "ports"))]
    found = [_check_port(port) for port in ports]
    found += [_check_device_files(), _check_locked_memory(needed=True), _check_huge_pages()]
    return [*found, *_check_peer_memory()]


def _check_port(port: Path) -> Finding:
    adapter = port.parent.parent.name
    subject = f"RDMA {adapter}/{port.name}"
    state = _text(port / "state").partition(": ")[2] or "unknown"
    link, rate = _text(port / "link_layer") or "unknown", _text(port / "rate") or "unknown speed"
    if state != _ACTIVE:
        remedy = (
            f"connect the port and set its interface up, or leave {adapter} out of rdma_devices"
        )
        return warned(subject, f"the port is {state}", remedy)
    if link != _ETHERNET:
        return passed(subject, f"active, {link}, {rate}")
    routable = [(index, address) for index, address in _roce_2_gids(port) if address is not None]
    if not routable:
        return warned(
            subject,
            f"active, {link}, {rate}, without a GID of RoCE v2 for an IPv4 address: other hosts cannot route to it",
            "give the port's interface an IPv4 address",
        )
    index, address = routable[0]
    detail = f"active, {link}, {rate}; GID {index} is RoCE v2 for {address}"
    return passed(subject, detail)


def _roce_2_gids(port: Path) -> Iterator[tuple[int, ipaddress.IPv4Address | None]]:
    """The indices of RoCE v2 GIDs, each with its IPv4 address, or None for one of IPv6."""
    for index in range(_GIDS_MAX):
        gid = _text(port / "gids" / str(index))
        if not gid:
            return
        if _text(port / "gid_attrs" / "types" / str(index)) != _ROCE_2:
            continue
        try:
            yield index, ipaddress.IPv6Address(gid).ipv4_mapped
        except ValueError:
            continue


def _check_device_files() -> Finding:
    subject = "RDMA device files"
    files = [path for path in _entries(_DEVICES) if path.name.startswith("uverbs")]
    if not files:
        remedy = "load the module ib_uverbs; in a container, pass /dev/infiniband"
        return failed(subject, f"{_DEVICES} has no uverbs file", remedy)
    closed = sorted(path.name for path in files if not os.access(path, os.R_OK | os.W_OK))
    if closed:
        return failed(
            subject,
            f"this user cannot open {', '.join(closed)}",
            "add the user to the group of these files, or give the files mode 0666 by a udev rule",
        )
    return passed(subject, f"this user can open {len(files)} of them")


def _check_locked_memory(*, needed: bool) -> Finding:
    subject = "locked memory"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024:,} KiB"
    if not needed:
        return passed(subject, f"the limit is {limit}; only RDMA needs it")
    if soft == resource.RLIM_INFINITY:
        return passed(subject, f"the limit is {limit}")
    return warned(
        subject,
        f"the limit of this shell is {limit}, and RDMA locks all KV memory",
        "set LimitMEMLOCK=infinity in the unit, `ulimit -l unlimited` in the shell, or ulimits in compose",
    )


def _check_huge_pages() -> Finding:
    subject = "huge pages"
    setting = _text(_HUGE_PAGES)
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen == "always":
        return passed(subject, "the kernel uses them for large memory")
    return Finding(
        Verdict.WARNING if chosen else Verdict.OK,
        subject,
        f"transparent huge pages are set to {chosen}, so KV memory has small pages"
        if chosen
        else "this kernel has no transparent huge pages",
        f"write always to {_HUGE_PAGES}" if chosen else "",
    )


def _check_peer_memory() -> Iterator[Finding]:
    """Where there is an NVIDIA driver, whether adapters can reach the memory of its devices."""
    if not _NVIDIA.exists():
        return
    subject = "GPUDirect RDMA"
    if _PEER_MEMORY.is_dir():
        yield passed(subject, "the module nvidia_peermem is loaded")
        return
    yield warned(
        subject,
        "the module nvidia_peermem is not loaded: adapters reach GPUs by DMA buffers, or KV crosses host memory",
        "`modprobe nvidia_peermem`; the worker's log states what it uses",
    )


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _text(path: Path) -> str:
    """The file's line; empty where it is missing, or where a GID's index is not in use."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


_STYLES: Final = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.ERROR: "red"}


@command(
    "doctor",
    "headrace doctor   |   headrace doctor --registry 10.0.0.1:7051",
    cls=AddressedCommand,
)
async def doctor(
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    as_json: Json = False,
) -> None:
    """Checks credentials, members, clocks, RDMA and software. Exit status 1 after an error."""

    report(await examine(registry, router), as_json=as_json)


def report(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Prints the findings. Raises typer.Exit with status 1 when there is an error."""
    if as_json:
        print_json({"findings": list(map(asdict, findings))})
    else:
        answer_console().print(_table(findings))
    if any(finding.verdict is Verdict.ERROR for finding in findings):
        raise typer.Exit(EXIT_FAILED)


async def examine(registry: str, router: str) -> list[Finding]:
    """All checks. An empty `registry` means that of the deployment with `router`."""
    findings = check_credentials()
    try:
        found = await registry_of(router, registry)
    except HeadraceError as error:
        remedy = "start a deployment, or name its registry"
        return [
            *findings,
            failed("registry", error.detail, remedy),
            *_about_this_host(),
        ]
    members, about_registry = await find_members(found)
    about_members = [
        *await check_members(members),
        *check_versions(members),
    ]
    return [*findings, *about_registry, *about_members, *_about_this_host()]


def _about_this_host() -> list[Finding]:
    return [*check_rdma(), *check_software()]


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("", "subject", "finding", "remedy"):
        table.add_column(title, overflow="fold")
    for one in findings:
        verdict = Text(one.verdict, style=_STYLES[one.verdict])
        table.add_row(verdict, Text(one.subject), Text(one.detail), Text(one.remedy))
    return table
