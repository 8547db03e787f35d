"""Addresses that a user gives."""

from __future__ import annotations

from headrace_common.config import split_host_port
from headrace_common.errors import ConfigError


def check_address(what: str, text: str) -> str:
    """Returns the address of a server, "host:port". `what` names its source. Raises ConfigError with the remedy."""
    try:
        port = split_host_port(text)[1]
        if port == 0:
            raise ValueError("no server has port 0: name its port, such as 127.0.0.1:7050")
    except ValueError as error:
        raise ConfigError(f"{what} is {text!r}: {error}") from error
    return text
