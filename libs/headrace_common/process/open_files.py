"""This process's limit of open files, of which each connection takes one."""

from __future__ import annotations

import logging
import resource
from typing import Final

_LOG = logging.getLogger(__name__)

# For connections that the process opens, its files and its libraries.
_RESERVED: Final = 512


def reserve_descriptors(
    wanted: int, listeners: int = 1, *, others: int = 0, enough: int = 0
) -> int:
    """Raises the limit of open files for `wanted` connections to each of several listeners.

    Returns how many each may have, beside what the process needs and `others`. Warns when they are fewer than `enough`,
    which means `wanted` where it is 0.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    reserved = others + _RESERVED
    needed = wanted * listeners + reserved
    if needed > soft:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fitting = max(1, (soft - reserved) // listeners)
    if fitting < (enough or wanted):
        _LOG.warning(
            "a listener should have %d connections, but the limit of open files leaves %d: raise it (ulimit -n)",
            enough or wanted,
            fitting,
        )
    return min(wanted, fitting)
