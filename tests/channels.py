"""Channels to the internal RPCs of live deployments."""

from __future__ import annotations

import grpc.aio

from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import TOKEN_KEY, Role
from headrace_common.access.table import roles_of
from headrace_common.access.tokens import create_token, load_local_key
from headrace_common.rpc.channel import open_channel


def operator_channel(endpoint: str) -> grpc.aio.Channel:
    """A channel with the role operator, by the local key."""
    return open_channel(endpoint, Credentials(role=Role.OPERATOR))


def permitted_metadata(method: str) -> tuple[tuple[str, str], ...]:
    """Metadata with a token of a role that may call the method, such as "/package.Service/Method"."""
    return role_metadata(min(roles_of(method), default=Role.ROUTER))


def role_metadata(role: Role) -> tuple[tuple[str, str], ...]:
    """Metadata with a token of a role for every receiver, as of an earlier release, by the local key."""
    return ((TOKEN_KEY, create_token(load_local_key(), role, "", 600)),)
