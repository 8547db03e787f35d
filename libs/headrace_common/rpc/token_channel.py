"""Adds a role token to the metadata of every call of a channel.

gRPC's call credentials need TLS. Its asynchronous interceptors wrap every message of a stream. This channel only
changes the start of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import grpc
import grpc.aio

from headrace_common.access.roles import TOKEN_KEY

_MultiCallable: TypeAlias = Callable[..., Any]
_Metadata: TypeAlias = "Sequence[tuple[str, str | bytes]]"
TokenSource: TypeAlias = Callable[[], str]
"""Returns the current token. It may raise ConfigError."""


class TokenChannel(grpc.aio.Channel):
    """A channel that adds the token that `token` returns to each call."""

    def __init__(self, channel: grpc.aio.Channel, token: TokenSource) -> None:
        self._channel = channel
        self._token = token

    async def __aenter__(self) -> TokenChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._with_token(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._with_token(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._with_token(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._with_token(self._channel.stream_stream(*arguments, **options))

    def _with_token(self, start_call: _MultiCallable) -> _MultiCallable:
        def start(*arguments: Any, metadata: _Metadata | None = None, **options: Any) -> Any:
            token = (TOKEN_KEY, self._token())
            return start_call(*arguments, metadata=(*(metadata or ()), token), **options)

        return start


class _CallDetails(NamedTuple):
    """The fields of grpc.ClientCallDetails, which has no constructor."""

    method: str
    timeout: float | None
    metadata: _Metadata | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class TokenInterceptor(grpc.UnaryUnaryClientInterceptor):
    """Does the same for the unary calls of a blocking channel."""

    def __init__(self, token: TokenSource) -> None:
        self._token = token

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        given = client_call_details
        details = _CallDetails(
            given.method,
            given.timeout,
            (*(given.metadata or ()), (TOKEN_KEY, self._token())),
            given.credentials,
            given.wait_for_ready,
            given.compression,
        )
        return continuation(details, request)
