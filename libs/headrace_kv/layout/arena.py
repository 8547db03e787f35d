"""Allocates one arena per rank for all of its KV, to be registered once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace_common.errors import ConfigError

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * 1024 * 1024


def suited_alignment_bytes(nbytes: int) -> int:
    """Alignment for an arena of `nbytes`: huge pages when it fills several, else pages, so that little is wasted."""
    return HUGE_PAGE_BYTES if nbytes >= 8 * HUGE_PAGE_BYTES else PAGE_BYTES


def padding_bytes(address: int, alignment_bytes: int) -> int:
    """Bytes from `address` to the next multiple of the alignment, fewer than the alignment."""
    return -address % alignment_bytes


def allocate_arena(nbytes: int, alignment_bytes: int) -> NDArray[np.uint8]:
    """Uninitialised memory of shape [nbytes] that starts at a multiple of the alignment.

    At most `alignment_bytes` more are allocated. Raises ConfigError unless the alignment is a power of two and `nbytes`
    is positive.
    """
    if nbytes <= 0:
        raise ConfigError(f"an arena cannot have {nbytes} bytes")
    if alignment_bytes <= 0 or alignment_bytes & (alignment_bytes - 1):
        raise ConfigError(f"an alignment is a power of two, not {alignment_bytes}")
    raw = np.empty(nbytes + alignment_bytes - 1, np.uint8)
    skipped = padding_bytes(int(raw.ctypes.data), alignment_bytes)
    return raw[skipped : skipped + nbytes]


def require_available(nbytes: int, setting: str) -> None:
    """Raises ConfigError when the host or the container has less memory than `setting` asks for."""
    available = available_bytes()
    if nbytes > available:
        raise ConfigError(
            f"{setting} asks for {nbytes / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB of memory are available: "
            f"lower {setting}",
            metadata={"field": setting},
        )


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Memory that can be taken without swapping: proc_meminfo(5), and the limit of a container's cgroup (version 2)."""
    host = 1024 * _table(meminfo)["MemAvailable:"]
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        # Files that were read once are given up first.
        used -= _table(cgroup / "memory.stat")["inactive_file"]
    except FileNotFoundError:
        return host
    return host if limit == "max" else min(host, int(limit) - used)


def _table(path: Path) -> dict[str, int]:
    """Numbers by the name in front of them."""
    lines = path.read_text(encoding="ascii").splitlines()
    return {name: int(number) for name, number, *_ in map(str.split, lines)}
