"""Channels to other services, with keepalive, large messages and no HTTP proxy."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, TypeAlias

import grpc
import grpc.aio

from headrace_common.access.credentials import Credentials, TlsFiles
from headrace_common.access.tls import TlsIdentity, tls_identity
from headrace_common.errors import ConfigError
from headrace_common.reloading import ReloadedFiles
from headrace_common.rpc.renewed_channel import RenewedChannel
from headrace_common.rpc.token_channel import TokenChannel, TokenInterceptor

if TYPE_CHECKING:
    from headrace_common.config import ServiceConfig

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
METADATA_BYTES_MAX = 64 * 1024

# For both ends of a Unix socket. It needs no pings, because the kernel reports a dead peer at once.
LOCAL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)

PING_TIMEOUT_VARIABLE = "HEADRACE_PING_TIMEOUT_S"
PING_TIMEOUT_S = 4.0
_PING_TIMEOUT_S_MAX = 3_600.0


def keepalive_options() -> tuple[tuple[str, int], ...]:
    """Keepalive options of clients and servers. They detect a dead peer within 7 s.

    HEADRACE_PING_TIMEOUT_S sets the ping timeout, which is 4 s by default. Machines that pause for seconds, such as
    emulated ones, need more. Raises ConfigError for an invalid value.
    """
    text = os.environ.get(PING_TIMEOUT_VARIABLE, "") or str(PING_TIMEOUT_S)
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= _PING_TIMEOUT_S_MAX:
        raise ConfigError(
            f"{PING_TIMEOUT_VARIABLE}: must be seconds above 0 and at most {_PING_TIMEOUT_S_MAX:g}, but is {text!r}"
        )
    # gRPC's ping timeout, a minute by default, overrides its keepalive timeout.
    timeout_ms = max(1, round(1e3 * timeout_s))
    return (
        ("grpc.keepalive_time_ms", 3_000),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


def _channel_options() -> tuple[tuple[str, int | str], ...]:
    return (
        *LOCAL_OPTIONS,
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", 2 * METADATA_BYTES_MAX),
        *keepalive_options(),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_http_proxy", 0),
    )


Identity: TypeAlias = "ServiceConfig | Credentials | TlsFiles | None"
"""What a channel presents: the settings of a service, credentials, TLS files only, or nothing."""


def open_channel(endpoint: str, identity: Identity = None) -> grpc.aio.Channel:
    """Opens a channel to "host:port", with mutual TLS and a role token when `identity` has them.

    The channel connects on first use. After a change of the TLS files or of the token, new calls present the new
    ones, and calls in progress go on. Raises ConfigError when a file cannot be read.
    """
    credentials = _credentials_of(identity)
    options = _channel_options()
    tls = _identity_of(credentials)
    if tls is None:
        channel = grpc.aio.insecure_channel(endpoint, options=options)
    else:
        channel = RenewedChannel(
            tls.current,
            lambda own: grpc.aio.secure_channel(endpoint, _presenting(own), options=options),
        )
    if not credentials.token_for(endpoint):
        return channel
    return TokenChannel(channel, lambda: credentials.token_for(endpoint))


def open_blocking_channel(endpoint: str, identity: Identity = None) -> grpc.Channel:
    """As open_channel, for use by threads. The channel keeps the certificate with which it was opened."""
    credentials = _credentials_of(identity)
    options = _channel_options()
    tls = _identity_of(credentials)
    channel = (
        grpc.insecure_channel(endpoint, options=options)
        if tls is None
        else grpc.secure_channel(endpoint, _presenting(tls.current()), options=options)
    )
    if not credentials.token_for(endpoint):
        return channel
    return grpc.intercept_channel(
        channel, TokenInterceptor(lambda: credentials.token_for(endpoint))
    )


def _identity_of(credentials: Credentials) -> ReloadedFiles[TlsIdentity] | None:
    """None means plaintext."""
    return tls_identity(credentials.tls) if credentials.tls.encrypts else None


def _presenting(identity: TlsIdentity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        identity.authority, identity.key or None, identity.certificate or None
    )


def _credentials_of(identity: Identity) -> Credentials:
    match identity:
        case None:
            return Credentials()
        case Credentials():
            return identity
        case TlsFiles():
            return Credentials(identity)
        case _:
            return Credentials.from_config(identity)
