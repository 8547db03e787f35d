"""The default ports and addresses to listen on, and free ones. docs/deployment.md lists the ports."""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
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
ROUTER_HTTP: Final = 7056
"""`http_listen` of routers: OpenAI HTTP for clients."""
ROUTER_STATUS: Final = 7057
"""`status_listen` of routers: the status page, for operators."""
PLANNER: Final = 7058
"""`internal_listen` of planners."""
HEALTH: Final = 7059
"""`health_listen` of the services in our container images."""
_HOST_PORT: Final = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})"
)
_PORT_MAX: Final = 65_535


def split_host_port(text: str) -> tuple[str, int]:
    """Splits "host:port". Raises ValueError with the expected form."""
    if "://" in text:
        raise ValueError("write it as host:port, such as 127.0.0.1:7000, and not as a URL")
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise ValueError("write it as host:port, such as 127.0.0.1:7000, with a port of 0 to 65535")
    port = int(match["port"])
    if port > _PORT_MAX:
        raise ValueError(f"there is no port {port}: write host:port with one of 0 to {_PORT_MAX}")
    return match["host"], port


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


FIRST_PORT: Final = 10_000
"""The kernel gives a socket without a port one from 32768 on (Linux, ip_local_port_range). Mooncake takes 15000 to
17000. Between the choice of a port and its use, neither takes one below."""
END_PORT: Final = 15_000
PORTS_PER_PROCESS: Final = 50
"""Processes with neighbouring ids choose different ports."""
_calls = itertools.count()


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port on which no process listens at an IPv4 address.

    A process returns no port twice before it has returned all of its share. Raises ConfigError when none is free.
    """
    shares = (END_PORT - FIRST_PORT) // PORTS_PER_PROCESS
    first = FIRST_PORT + os.getpid() % shares * PORTS_PER_PROCESS
    for call in itertools.islice(_calls, PORTS_PER_PROCESS):
        port = first + call % PORTS_PER_PROCESS
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # A server sets it, too: connections that ended before keep no port from it.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise ConfigError(
        f"ports {first} to {first + PORTS_PER_PROCESS - 1} of {host} are all in use: end what listens there"
    )
