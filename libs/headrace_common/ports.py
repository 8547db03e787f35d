"""The default ports and addresses to listen on. docs/deployment.md lists the ports."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

from headrace_common.errors import ConfigError

ROUTER: Final = 7050
"""`listen` of routers: gRPC for clients."""
REGISTRY: Final = 7051
"""`internal_listen` of the registry."""
PREFILL: Final = 7052
"""`internal_listen` of prefill workers, where a port is fixed."""
DECODE: Final = 7053
"""`internal_listen` of decode workers, where a port is fixed."""
ROUTER_INTERNAL: Final = 7054
"""`internal_listen` of routers, where a port is fixed."""
WORKER: Final = 7055
"""`internal_listen` of workers of both roles, where a port is fixed."""
PAIRS: Final = 7730
"""`listen` of prefill servers of stock vLLM."""
PAIR_PROXY: Final = 8000
"""`headrace pair`: OpenAI HTTP for clients of two servers of stock vLLM."""
ROUTER_HTTP: Final = 7056
"""`http_listen` of routers: OpenAI HTTP for clients."""
ROUTER_STATUS: Final = 7057
"""`status_listen` of routers: the status page, for operators."""
PLANNER: Final = 7058
"""`internal_listen` of planners."""
HEALTH: Final = 7059
"""`health_listen` of the services in our container images."""


def is_loopback(address: str) -> bool:
    """Whether "host:port" or a host is on the loopback interface. A name other than localhost is not."""
    host = address.rpartition(":")[0] if address.count(":") == 1 or "]:" in address else address
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def cannot_listen(setting: str, listen: str, why: str) -> ConfigError:
    """The error of a service that cannot listen on the address of a setting."""
    return ConfigError(
        f"cannot listen on {listen}: {why}; stop what uses the port or set {setting}",
        metadata={setting: listen, "cause": why},
    )


def check_free(setting: str, listen: str, host: str, port: int) -> None:
    """Binds the port once before gRPC does, because gRPC hides the reason of a failure. Raises ConfigError."""
    try:
        addresses = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in addresses:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        raise cannot_listen(setting, listen, error.strerror or str(error)) from error
