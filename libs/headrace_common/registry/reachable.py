"""Waits for the registry without gRPC, so that engine processes can be forked afterwards."""

from __future__ import annotations

import logging
import socket
import time
from typing import Final

from headrace_common.config import split_host_port
from headrace_common.deadlines import Deadline
from headrace_common.errors import RegistryUnavailable

_LOG = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S: Final = 2.0
_POLL_S: Final = 0.2


def wait_reachable(registry: str, timeout_s: float) -> None:
    """Returns when a process listens at the registry's "host:port". Blocks, for use before anything else runs.

    A worker calls it before it loads a model, so that a wrong address costs seconds. Raises RegistryUnavailable.
    """
    host, port = split_host_port(registry)
    deadline = Deadline.after(timeout_s)
    warned = False
    while True:
        try:
            limit_s = min(_CONNECT_TIMEOUT_S, max(_POLL_S, deadline.remaining_s()))
            socket.create_connection((host.strip("[]"), port), limit_s).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if deadline.expired:
            raise RegistryUnavailable(
                f"the registry on {registry} is not reachable ({reason}), so no model was loaded: start it, or set "
                "registry to its address",
                metadata={"registry": registry},
            )
        if not warned:
            warned = True
            _LOG.warning("waiting for the registry on %s: %s", registry, reason)
        time.sleep(_POLL_S)
