"""Channels to other services, with keepalive, large messages, role tokens, current certificates and no HTTP proxy.

gRPC's call credentials need TLS, and its asynchronous interceptors add tasks to every call. So a ServiceChannel has its
own. It checks the responses of internal RPCs against the bounds of their fields.

A channel of gRPC presents the certificate of its creation, also when it connects again years later. A renewed one makes
a new channel of gRPC for the calls that start after a change. Calls in progress end on the channel that they began on.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message

from headrace_common.access.credentials import Credentials, Metadata, TlsFiles
from headrace_common.access.table import ROLES, Listener
from headrace_common.access.tls import TlsIdentity, tls_identity
from headrace_common.errors import ConfigError, ProtocolViolation
from headrace_common.reloading import ReloadedFiles
from headrace_common.rpc.field_bounds import check_of
from headrace_common.rpc.status import rpc_error_of

if TYPE_CHECKING:
    from headrace_common.config import ServiceConfig


_Metadata: TypeAlias = "Sequence[tuple[str, str | bytes]]"
TokenSource: TypeAlias = Callable[[], Metadata]
"""Returns the current token and proof of a call's metadata. It may raise ConfigError."""


class ServiceChannel(grpc.aio.Channel):
    """`identity` returns the certificate in force, and `connect` makes a channel that presents one; None is plaintext.

    `token` returns the token and the proof of a call, empty for none.
    """

    def __init__(
        self,
        identity: Callable[[], TlsIdentity | None],
        connect: Callable[[TlsIdentity | None], grpc.aio.Channel],
        token: TokenSource = tuple,
    ) -> None:
        self._token = token
        self._identity = identity
        self._connect = connect
        self._used = identity()
        self._current = _CountedChannel(connect(self._used))
        self._replaced: dict[_CountedChannel, asyncio.Task[None]] = {}
        self._closed = False

    async def __aenter__(self) -> ServiceChannel:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        waits = list(self._replaced.values())
        for task in waits:
            task.cancel()
        channels = [counted.channel for counted in (*self._replaced, self._current)]
        await asyncio.gather(*(channel.close(grace) for channel in channels))
        await asyncio.gather(*waits, return_exceptions=True)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._renewed().channel.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._starter("unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._starter("unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._starter("stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._starter("stream_stream", arguments, options)

    def _starter(
        self, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Callable[..., Any]:
        counted = self._current
        start_call = getattr(counted.channel, kind)(*arguments, **options)
        is_checked = arguments[0] in _CHECKED

        def start(
            *call_arguments: Any, metadata: _Metadata | None = None, **call_options: Any
        ) -> Any:
            nonlocal counted, start_call
            current = self._renewed()
            if current is not counted:
                counted = current
                start_call = getattr(current.channel, kind)(*arguments, **options)
            if token := self._token():
                metadata = (*(metadata or ()), *token)
            call = start_call(*call_arguments, metadata=metadata, **call_options)
            return counted.count(_CheckedCall(call) if is_checked else call)

        return start

    def _renewed(self) -> _CountedChannel:
        """The channel for the next call."""
        identity = self._identity()
        if identity is not self._used and not self._closed:
            if identity != self._used:
                old = self._current
                self._current = _CountedChannel(self._connect(identity))
                self._replaced[old] = asyncio.create_task(self._close_when_unused(old))
            self._used = identity
        return self._current

    async def _close_when_unused(self, counted: _CountedChannel) -> None:
        await counted.wait_unused()
        await counted.channel.close()
        del self._replaced[counted]


_CHECKED: Final = frozenset(
    method for method in ROLES[Listener.INTERNAL] if method.startswith("/headrace.")
)


class _CheckedCall:
    """A call that fails with a ProtocolViolation of its server when a field of a response is beyond its bound."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._find_excess: Callable[[Any], str] = self._find_first

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._checked((yield from self._call.__await__()))

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for response in self._call:
            yield self._checked(response)

    async def read(self) -> Any:
        return self._checked(await self._call.read())

    def _checked(self, response: Any) -> Any:
        if response is not grpc.aio.EOF and (excess := self._find_excess(response)):
            self._call.cancel()
            raise rpc_error_of(ProtocolViolation(excess))
        return response

    def _find_first(self, response: Any) -> str:
        """All responses of a call are of one kind."""
        if isinstance(response, Message):
            self._find_excess = check_of(type(response))
            return self._find_excess(response)
        return ""


class _CountedChannel:
    """A channel and the number of its calls in progress."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._calls = 0
        self._unused = asyncio.Event()
        self._unused.set()

    def count(self, call: Any) -> Any:
        self._calls += 1
        self._unused.clear()
        call.add_done_callback(self._end)
        return call

    async def wait_unused(self) -> None:
        await self._unused.wait()

    def _end(self, call: Any) -> None:
        self._calls -= 1
        if not self._calls:
            self._unused.set()


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


def ping_timeout_s() -> float:
    """Seconds that a peer may take to answer a ping: 4, or HEADRACE_PING_TIMEOUT_S.

    Machines that pause for seconds, such as emulated ones, need more. Raises ConfigError for an invalid value.
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
    return timeout_s


def keepalive_options() -> tuple[tuple[str, int], ...]:
    """Keepalive options of clients and servers. They detect a dead peer within 7 s. Raises ConfigError."""
    # gRPC's ping timeout, a minute by default, overrides its keepalive timeout.
    timeout_ms = max(1, round(1e3 * ping_timeout_s()))
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


def open_channel(endpoint: str, identity: Identity = None, receiver: str = "") -> grpc.aio.Channel:
    """Opens a channel to "host:port", with mutual TLS and a role token when `identity` has them.

    `receiver`: see Credentials.metadata_for.

    The channel connects on first use. After a change of the TLS files or of the token, new calls present the new
    ones, and calls in progress go on. Raises ConfigError when a file cannot be read.
    """
    credentials = _credentials_of(identity)
    options = _channel_options()
    tls = _identity_of(credentials)
    token: TokenSource = partial(credentials.metadata_for, endpoint, receiver)

    def connect(own: TlsIdentity | None) -> grpc.aio.Channel:
        if own is None:
            return grpc.aio.insecure_channel(endpoint, options=options)
        return grpc.aio.secure_channel(endpoint, _presenting(own), options=options)

    current = tls.current if tls is not None else lambda: None
    return ServiceChannel(current, connect, token if token() else tuple)


def open_blocking_channel(endpoint: str, identity: Identity = None) -> grpc.Channel:
    """As open_channel, for use by threads. It keeps its certificate, and calls need a token of their own."""
    tls = _identity_of(_credentials_of(identity))
    if tls is None:
        return grpc.insecure_channel(endpoint, options=_channel_options())
    return grpc.secure_channel(endpoint, _presenting(tls.current()), options=_channel_options())


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
