"""Channels to the internal RPCs of live deployments."""

from __future__ import annotations

import grpc.aio

from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.rpc.channel import open_channel


def operator_channel(endpoint: str) -> grpc.aio.Channel:
    """A channel with the role operator, by the local key."""
    return open_channel(endpoint, Credentials(role=Role.OPERATOR))
