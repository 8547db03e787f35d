"""Errors of an address to listen on, for servers that gRPC binds."""

from __future__ import annotations

import socket

from headrace_common.errors import ConfigError


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
