"""The check of a remote pool."""

from __future__ import annotations

import asyncio
from typing import Final

from headrace_cli.doctor.finding import Finding, Verdict
from headrace_common.config import split_host_port

_SUBJECT: Final = "remote pool"
_TIMEOUT_S: Final = 2.0


async def check_pool(address: str) -> Finding:
    """Whether the master at `address` takes connections of this host."""
    try:
        host, port = split_host_port(address)
    except ValueError as error:
        return Finding(Verdict.ERROR, _SUBJECT, f"--pool: {error}", "name it as host:port")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), port)
    except OSError as error:
        # A timeout is one too.
        cause = error.strerror or f"nothing within {_TIMEOUT_S:g} s"
        return Finding(
            Verdict.ERROR,
            _SUBJECT,
            f"the master at {address} does not answer ({cause}), so workers compute what it has",
            "start it, or open it to the hosts of workers",
        )
    writer.close()
    return Finding(Verdict.OK, _SUBJECT, f"the master at {address} takes connections")
