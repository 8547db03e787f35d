"""Drops the lines that every healthy start of a Mooncake engine writes to stderr."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

_STDERR: Final = 2
_HEALTHY: Final = (
    # An engine searches for its own segment before it has made it. It logs this as an error.
    b"] Local segment descriptor not found",
    # Mooncake logs with glog, and does not initialize it.
    b"WARNING: Logging before InitGoogleLogging() is written to STDERR",
)
"""Ends of lines. Every other line is kept: Mooncake explains failures on stderr only."""


@contextlib.contextmanager
def without_known_lines() -> Iterator[None]:
    """Within this context, what the process writes to stderr is kept in memory. At its end, it is written out.

    Only the known lines are missing then. Calls must not overlap. A crash within loses what was kept.
    """
    try:
        kept = os.memfd_create("headrace-stderr", os.MFD_CLOEXEC)
        original = os.dup(_STDERR)
    except OSError:
        # No memory file, or stderr is closed.
        yield
        return
    try:
        os.dup2(kept, _STDERR)
        try:
            yield
        finally:
            os.dup2(original, _STDERR)
            _write_all(original, wanted_lines(os.pread(kept, os.fstat(kept).st_size, 0)))
    finally:
        os.close(original)
        os.close(kept)


def wanted_lines(content: bytes) -> bytes:
    """The content without the known lines."""
    return b"".join(
        line for line in content.splitlines(keepends=True) if not line.rstrip().endswith(_HEALTHY)
    )


def _write_all(descriptor: int, content: bytes) -> None:
    with contextlib.suppress(OSError):
        while content:
            content = content[os.write(descriptor, content) :]
